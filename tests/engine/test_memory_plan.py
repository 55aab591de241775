"""What a model takes on each device is known from its header, before anything is loaded."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as llama
import numpy as np
import pytest

from dflash_trio.config import CacheType
from dflash_trio.engine.context_size import context_size, microbatch
from dflash_trio.engine.host_memory import HostMemory
from dflash_trio.engine.llama_abi import silence_llama_log
from dflash_trio.engine.memory_plan import (
    GPU_RESERVE,
    MIB,
    Demand,
    DoesNotFit,
    Need,
    Needs,
    Plan,
    Room,
    estimate,
    layer_homes,
)
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.model_shape import ModelShape
from tests.engine.written_models import write_model

KIB = 1024


def shape_of(path: Path) -> ModelShape:
    return check_model_file(str(path)).shape


def demand(shape: ModelShape, **changes: Any) -> Demand:
    slots = changes.pop("slots", 1)
    context = context_size(
        trained=shape.trained_ctx,
        slots=slots,
        max_ctx=changes.pop("max_ctx", 1024),
        pool=changes.pop("pool", None),
    )
    settings = {"microbatch": microbatch(changes.pop("chunk", 512), slots), "split": ()}
    return Demand(shape=shape, context=context, **(settings | changes))


@pytest.fixture
def plain(tmp_path: Path) -> ModelShape:
    """Four layers of 10 KiB, embeddings of 100, an output of 50; 32 values of K and of V."""
    return shape_of(write_model(tmp_path / "plain.gguf"))


# ------------------------------------------------------------------------------------- weights


def test_all_layers_and_the_output_go_to_the_gpu_and_the_embeddings_stay(plain: ModelShape) -> None:
    needs = estimate(demand(plain, split=(1.0,)))
    assert needs.gpus[0].weights == (4 * 10 + 50) * KIB
    assert needs.cpu.weights == 100 * KIB
    assert needs.cpu.cache == 0


@pytest.mark.parametrize(
    ("gpu_layers", "on_gpu"), [(0, 0), (1, 50), (2, 60), (4, 80), (5, 90), (99, 90)]
)
def test_of_fewer_layers_the_last_go_to_the_gpu_the_output_first(
    plain: ModelShape, gpu_layers: int, on_gpu: int
) -> None:
    needs = estimate(demand(plain, split=(1.0,), gpu_layers=gpu_layers))
    assert needs.gpus[0].weights == on_gpu * KIB
    assert needs.cpu.weights == (190 - on_gpu) * KIB


def test_a_layer_s_cache_lies_where_the_layer_does(plain: ModelShape) -> None:
    whole = estimate(demand(plain, split=(1.0,))).gpus[0].cache
    half = estimate(demand(plain, split=(1.0,), gpu_layers=3))
    assert (half.gpus[0].cache, half.cpu.cache) == (whole // 2, whole // 2)


def test_embeddings_that_are_the_output_too_are_counted_where_they_load(tmp_path: Path) -> None:
    tied = shape_of(write_model(tmp_path / "tied.gguf", others={"token_embd.weight": 100}))
    on_gpu = estimate(demand(tied, split=(1.0,)))
    assert (on_gpu.gpus[0].weights, on_gpu.cpu.weights) == (140 * KIB, 100 * KIB)
    assert estimate(demand(tied)).cpu.weights == 140 * KIB


def test_layers_are_shared_out_by_the_split_s_weights() -> None:
    assert layer_homes(7, None, (1.0, 1.0)) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layer_homes(7, None, (3.0, 1.0)) == [0, 0, 0, 0, 0, 0, 1, 1]
    assert layer_homes(7, 4, (1.0, 1.0)) == [-1, -1, -1, -1, 0, 0, 1, 1]
    assert layer_homes(7, None, ()) == [-1] * 8


def test_experts_that_stay_on_the_cpu_are_counted_there(tmp_path: Path) -> None:
    tensors = {"attn_k.weight": 10, "ffn_up_exps.weight": 30, "ffn_up_shexp.weight": 5}
    shape = shape_of(
        write_model(
            tmp_path / "moe.gguf",
            layer_tensors=tensors,
            facts={"expert_count": 8, "expert_used_count": 2},
        )
    )
    assert (shape.experts, shape.experts_used) == (8, 2)
    needs = estimate(demand(shape, split=(1.0,), cpu_moe=True))
    assert needs.gpus[0].weights == (4 * 15 + 50) * KIB
    assert needs.cpu.weights == (100 + 4 * 30) * KIB


def test_heads_for_further_tokens_take_nothing_as_they_are_not_loaded(tmp_path: Path) -> None:
    shape = shape_of(write_model(tmp_path / "m.gguf", facts={"nextn_predict_layers": 1}))
    needs = estimate(demand(shape, split=(1.0,)))
    assert needs.gpus[0].weights == (3 * 10 + 50) * KIB


def test_the_parts_of_a_split_file_are_counted_together(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        if not number:
            writer.add_uint32("llama.block_count", 2)
        writer.add_tensor(f"blk.{number}.attn_k.weight", np.zeros((10, 256), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert [layer.weights for layer in shape_of(paths[0]).layers] == [10 * KIB, 10 * KIB]


# --------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize(
    ("kind", "row"),
    [("f32", 128), ("f16", 64), ("bf16", 64), ("q8_0", 34), ("q4_0", 18), ("q5_1", 24)],
)
def test_cache_is_cells_times_values_at_their_type_s_size(
    plain: ModelShape, kind: CacheType, row: int
) -> None:
    needs = estimate(demand(plain, cache_type_k=kind, slots=3))
    assert needs.cpu.cache == 4 * 3 * 1024 * (row + 64)


def test_cells_are_padded_in_every_stream(plain: ModelShape) -> None:
    row = 4 * (64 + 64)
    assert estimate(demand(plain, max_ctx=257, slots=2)).cpu.cache == 2 * 512 * row
    assert estimate(demand(plain, max_ctx=257, slots=2, pool=300)).cpu.cache == 512 * row
    assert estimate(demand(plain, max_ctx=4, slots=2, pool=4)).cpu.cache == 256 * row


@pytest.mark.parametrize("pattern", [2, [True, False, True, False]])
def test_a_window_remembers_itself_and_a_micro_batch_unless_prompts_go_on(
    tmp_path: Path, pattern: int | list[bool]
) -> None:
    facts = {"attention.sliding_window": 100, "attention.sliding_window_pattern": pattern}
    shape = shape_of(write_model(tmp_path / "w.gguf", "gemma3", facts=facts))
    assert [layer.windowed for layer in shape.layers] == [True, False, True, False]
    few = estimate(demand(shape, max_ctx=4096, chunk=100)).cpu.cache
    assert few == (2 * 4096 + 2 * 256) * 128
    assert estimate(demand(shape, max_ctx=4096, keeps_prefixes=True)).cpu.cache == 4 * 4096 * 128


def test_a_window_whose_pattern_nobody_knows_counts_as_full_attention(tmp_path: Path) -> None:
    facts = {"attention.sliding_window": 100}
    shape = shape_of(write_model(tmp_path / "w.gguf", "novel", facts=facts))
    assert not any(layer.windowed for layer in shape.layers)


def test_latent_attention_keeps_keys_only(tmp_path: Path) -> None:
    facts = {
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
    }
    shape = shape_of(write_model(tmp_path / "mla.gguf", "deepseek2", facts=facts))
    assert [(layer.k, layer.v) for layer in shape.layers] == [(576, 0)] * 4


def test_a_recurrent_layer_has_a_state_for_each_sequence_and_no_cells(tmp_path: Path) -> None:
    facts = {
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 1,
    }
    tensors = {"ssm_conv1d.weight": 1, "attn_qkv.weight": 1}
    path = write_model(tmp_path / "r.gguf", "qwen3next", facts=facts, layer_tensors=tensors)
    needs = estimate(demand(shape_of(path), slots=3))
    assert needs.cpu.cache == 4 * 3 * 4 * (3 * (64 + 2 * 16) + 64 * 16)


def test_deepseek_4_keeps_compressed_keys_beside_a_window(tmp_path: Path) -> None:
    facts = {
        "attention.head_count_kv": 1,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.sliding_window": 128,
        "attention.indexer.key_length": 128,
        "attention.compress_ratios": [0, 4, 128, 4],
    }
    path = write_model(tmp_path / "d.gguf", "deepseek4", facts=facts)
    needs = estimate(demand(shape_of(path), max_ctx=8192, slots=2, pool=8192))
    # A stream for each sequence, however the pool is shared: window and micro-batch, and of the
    # layers that compress, 2048 or 256 cells; then keys and scores that wait to be compressed.
    raw = 4 * 768 * 1024
    compressed = 2 * 2048 * (1024 + 256) + 256 * 1024
    waiting = 2 * (128 * 512 + 128 * 128) + 8 * 512 * 128
    assert needs.cpu.cache == 2 * (raw + compressed + waiting)


def test_no_number_in_a_header_is_believed_blindly(tmp_path: Path) -> None:
    facts = {
        "block_count": 2**32 - 1,
        "attention.head_count": [0, 0],
        "attention.key_length": float("inf"),
        "embedding_length": float("nan"),
        "feed_forward_length": [float("nan")],
    }
    shape = shape_of(write_model(tmp_path / "odd.gguf", facts=facts))
    assert len(shape.layers) == 4096
    estimate(demand(shape, split=(1.0, 2.0)))


# ----------------------------------------------------------------------------------- computing


def test_attention_without_flash_kernels_needs_its_scores(plain: ModelShape) -> None:
    flash, plain_ = (
        estimate(demand(plain, flash_attention=on)).cpu.computing for on in (True, False)
    )
    assert plain_ - flash == 4 * 512 * 1024 * 4


def test_what_the_cpu_keeps_visits_the_first_gpu(tmp_path: Path) -> None:
    tensors = {"attn_k.weight": 10, "ffn_up_exps.weight": 30, "ffn_down_exps.weight": 20}
    facts = {"expert_count": 8, "expert_used_count": 2}
    shape = shape_of(write_model(tmp_path / "moe.gguf", layer_tensors=tensors, facts=facts))
    one = (1.0,)
    whole = estimate(demand(shape, split=one)).gpus[0].computing
    for changes in ({"cpu_moe": True}, {"gpu_layers": 4}):
        visited = estimate(demand(shape, split=one, **changes)).gpus[0].computing
        assert visited - whole == 30 * KIB


def test_gpus_that_hold_all_layers_keep_the_masks_four_times(plain: ModelShape) -> None:
    mask = 2 * 513 * 1024
    whole, part = (
        estimate(demand(plain, split=(1.0, 1.0), gpu_layers=layers, microbatch=513))
        for layers in (5, 4)
    )
    assert whole.gpus[1].computing - part.gpus[1].computing == 3 * mask


def test_each_gpu_has_a_reserve(plain: ModelShape) -> None:
    needs = estimate(demand(plain, split=(1.0, 1.0)))
    assert all(need.computing > GPU_RESERVE for need in needs.gpus)
    assert needs.cpu.computing < GPU_RESERVE


# ------------------------------------------------------------------------- llama.cpp's own word


class Measured:
    """What llama.cpp says that a context would take, without allocating it."""

    def __init__(self, path: Path, asked: Demand, *, swa_full: bool) -> None:
        lines: list[str] = []

        @llama.llama_log_callback
        def collect(_level: int, text: bytes, _data: Any) -> None:
            lines.append(text.decode("utf-8", "replace"))

        llama.llama_log_set(collect, ctypes.c_void_p(0))
        try:
            params = llama.llama_model_default_params()
            params.no_alloc, params.load_mode = True, llama.LLAMA_LOAD_MODE_NONE
            model = llama.llama_model_load_from_file(str(path).encode(), params)
            context = llama.llama_context_default_params()
            context.n_ctx, context.n_seq_max = asked.context.cells, asked.context.slots
            context.kv_unified = not asked.context.partitioned
            context.n_batch = context.n_ubatch = asked.microbatch
            context.n_outputs_max = asked.context.slots
            context.swa_full, context.flash_attn_type = swa_full, int(asked.flash_attention)
            context.type_k = context.type_v = 8 if asked.cache_type_k == "q8_0" else 1
            made = llama.llama_init_from_model(model, context)
            llama.llama_free(made)
            llama.llama_model_free(model)
        finally:
            silence_llama_log()
        text = "".join(lines)
        sizes = re.findall(r"size = +([\d.]+) MiB \( *\d+ cells", text)
        self.cache = sum(float(size) for size in sizes)
        self.computing = float(re.findall(r"compute buffer size = +([\d.]+)", text)[-1])


@pytest.mark.real
@pytest.mark.parametrize("model", ["smollm2", "gemma"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slots": 4, "keeps_prefixes": True},
        {"slots": 4, "max_ctx": 8000, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"slots": 4, "max_ctx": 8192, "pool": 10000},
        {"slots": 2, "max_ctx": 4096, "flash_attention": False},
        {"slots": 4, "max_ctx": 8192, "chunk": 64},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_the_estimate_is_what_llama_cpp_reserves(
    request: pytest.FixtureRequest, model: str, changes: dict[str, Any]
) -> None:
    path: Path = request.getfixturevalue(model)
    asked = demand(shape_of(path), **changes)
    need = estimate(asked).cpu
    measured = Measured(path, asked, swa_full=asked.keeps_prefixes)
    assert need.cache / MIB == pytest.approx(measured.cache, abs=0.1)
    assert need.computing / MIB == pytest.approx(measured.computing, rel=0.3, abs=4)


# ------------------------------------------------------------------------------------ the plan


def needs(gpu: int = 0, *, cpu: int = 0, pinned: bool = False) -> Needs:
    return Needs((Need(weights=gpu * MIB),), Need(weights=cpu * MIB, cache=MIB), pinned)


def test_what_earlier_blocks_take_is_not_free_for_later_ones() -> None:
    plan = Plan((Room("cuda:0", 100 * MIB, 200 * MIB),))
    plan = plan.taking(["cuda:0"], needs(60))
    with pytest.raises(DoesNotFit) as caught:
        plan.taking(["cuda:0"], needs(50))
    assert str(caught.value) == (
        "does not fit on cuda:0: it needs 50 MiB (weights 50, KV cache 0, computing 0), "
        "and 40 of 200 MiB are free beside 60 MiB for other models"
    )
    plan.taking(["cuda:0"], needs(40))


def test_a_gpu_that_cannot_say_what_is_free_is_believed() -> None:
    plan = Plan((Room("vulkan:0", 0, 0),))
    plan.taking(["vulkan:0"], needs(10**6))
    assert not plan.has_room("vulkan:0", Need(weights=1)), "but auto does not choose it"


def test_a_mapped_file_may_be_larger_than_the_memory_with_a_warning() -> None:
    plan = Plan(host=HostMemory(available=100 * MIB, swap=0))
    plan = plan.taking([], Needs((), Need(weights=500 * MIB), pinned=False))
    (warning,) = plan.warnings
    assert "needs 500 MiB" in warning
    assert "100 MiB are free" in warning


def test_what_cannot_be_taken_back_has_to_fit_into_memory_and_swap_space() -> None:
    plan = Plan(host=HostMemory(available=100 * MIB, swap=50 * MIB))
    with pytest.raises(DoesNotFit, match=r"needs 500 MiB .* 150 MiB are free"):
        plan.taking([], Needs((), Need(weights=500 * MIB), pinned=True))
    plan = plan.taking([], Needs((), Need(cache=140 * MIB), pinned=False))
    with pytest.raises(DoesNotFit, match=r"10 MiB are free .* beside 140 MiB for other models"):
        plan.taking([], Needs((), Need(cache=20 * MIB), pinned=False))


def test_a_host_that_says_nothing_refuses_nothing() -> None:
    assert Plan().taking([], Needs((), Need(cache=2**60), pinned=True)).warnings == ()
