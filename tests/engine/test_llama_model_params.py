"""llama.cpp does what it is told of devices, experts and the header's numbers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from dflash_trio.config import DevicePlacement
from dflash_trio.engine import llama_abi, llama_model_params
from dflash_trio.engine.llama_abi import BackendDevice
from dflash_trio.engine.llama_model_params import ModelParams, find_devices
from dflash_trio.engine.llama_runner import LlamaRunner, LlamaSpec
from dflash_trio.engine.model_runner import BatchSlice, ModelLoadError

WIDTH, TOKENS, EXPERTS = 32, 300, 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with random weights, small enough to write down."""
    path = tmp_path_factory.mktemp("mixture") / "mixture.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_tokenizer_model("llama")
    special = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"w{i}" for i in range(TOKENS - len(special) - len(octets))]
    kinds = [2, 3, 3] + [6] * len(octets) + [1] * len(words)
    writer.add_token_list(special + octets + words)
    writer.add_token_scores([0.0] * TOKENS)
    writer.add_token_types(kinds)
    dice = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, dice.standard_normal(shape).astype(np.float32))

    add("token_embd.weight", TOKENS, WIDTH)
    add("output_norm.weight", WIDTH)
    add("output.weight", TOKENS, WIDTH)
    for name in ("attn_norm", "ffn_norm"):
        add(f"blk.0.{name}.weight", WIDTH)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.0.{name}.weight", WIDTH, WIDTH)
    add("blk.0.ffn_gate_inp.weight", EXPERTS, WIDTH)
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        add(f"blk.0.{name}.weight", EXPERTS, WIDTH, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(path: Path, **changes: Any) -> Any:
    """What the model makes of three tokens."""
    spec = LlamaSpec(
        path=str(path),
        devices=(DevicePlacement("cpu", 0),),
        slots=1,
        max_ctx=256,
        pool=None,
        chunk=64,
        threads=1,
        **changes,
    )
    runner = LlamaRunner(spec, on_progress=lambda _: None, stopped=threading.Event())
    try:
        runner.decode([BatchSlice(0, 0, (5, 6, 7), 1)])
        return runner.logits(0).copy()
    finally:
        runner.close()


def test_a_number_in_the_place_of_the_header_s_is_what_the_model_computes_with(
    mixture: Path,
) -> None:
    plain = logits(mixture)
    assert np.array_equal(plain, logits(mixture, overrides={"llama.expert_used_count": 2}))
    assert not np.allclose(plain, logits(mixture, overrides={"llama.expert_used_count": 1}))


def test_experts_kept_on_the_cpu_change_no_answer(mixture: Path) -> None:
    assert np.array_equal(logits(mixture), logits(mixture, cpu_moe=True))


def test_a_block_on_the_cpu_names_no_device_and_no_layer() -> None:
    params = ModelParams(mmap=True, mlock=False)
    assert params.place([], gpu_layers=None) == 0
    assert params.raw.n_gpu_layers == 0
    assert params.raw.devices, "a list of none: without one llama.cpp takes every GPU"
    assert find_devices([DevicePlacement("cpu", 7)]) == []


def test_one_device_holds_all_layers_or_as_many_as_are_given() -> None:
    gpu = BackendDevice("cuda:0", "", 1, 1, handle=4711)
    params = ModelParams(mmap=True, mlock=False)
    assert params.place([gpu], gpu_layers=None) == llama_model_params.ALL_LAYERS
    assert params.place([gpu], gpu_layers=3) == 3
    assert params.raw.split_mode == 0
    assert not params.raw.tensor_split


def test_several_devices_share_the_layers_by_their_weights() -> None:
    gpus = [BackendDevice(f"cuda:{i}", "", 1, 1, handle=4711 + i) for i in range(2)]
    params = ModelParams(mmap=True, mlock=False)
    params.place(gpus, gpu_layers=None, split=(3, 1))
    assert params.raw.split_mode == 1
    assert list(params.raw.tensor_split[:2]) == [3, 1]
    params.place(gpus, gpu_layers=None)
    assert list(params.raw.tensor_split[:2]) == [1, 1], "even, not by what happens to be free"


def test_a_placement_s_devices_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(BackendDevice(f"cuda:{i}", "", 1, 1, handle=i) for i in range(2))
    monkeypatch.setattr(llama_model_params, "gpu_devices", lambda memory_of: gpus)
    both = [DevicePlacement("cuda", 1), DevicePlacement("cuda", 0)]
    assert find_devices(both) == [gpus[1], gpus[0]]
    with pytest.raises(ModelLoadError, match=r"no device cuda:2 here; .* cuda:0, cuda:1, cpu:0"):
        find_devices([DevicePlacement("cuda", 2)])


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("libggml-cuda.so", b"\0GGML_CUDA_P2P\0", True),
        ("libggml-hip.so.0", b"GGML_CUDA_P2P", True),
        ("libggml-cuda.so", b"an older build", False),
        ("libggml-cuda.so", b"", False),
        ("libggml-cpu.so", b"GGML_CUDA_P2P", False),
    ],
)
def test_the_switch_for_peer_access_is_looked_for_in_the_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, found: bool
) -> None:
    (tmp_path / name).write_bytes(content)
    library = SimpleNamespace(_name=str(tmp_path / "libllama.so"))
    monkeypatch.setattr(llama_abi.llama, "_lib", library)
    assert llama_abi.peer_access_variable() == ("GGML_CUDA_P2P" if found else None)
