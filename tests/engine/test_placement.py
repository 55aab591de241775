"""Where blocks load is decided once for all of them, and what cannot be ends the start by name."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from dflash_trio.config import DevicePlacement, ModelConfig
from dflash_trio.engine import placement
from dflash_trio.engine.context_size import MOST_PENDING_BYTES, pending_bytes
from dflash_trio.engine.draft_file import DraftFile
from dflash_trio.engine.host_memory import HostMemory
from dflash_trio.engine.llama_abi import BackendDevice
from dflash_trio.engine.memory_plan import MIB
from dflash_trio.engine.model_file import check_model_file
from dflash_trio.engine.placement import Placed, PlacementError, place_models
from tests.engine.written_models import write_model

CUDA_0, CUDA_1 = DevicePlacement("cuda", 0), DevicePlacement("cuda", 1)


class Machine:
    """The devices that blocks are placed on in a test, and the files of the models."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self.path = write_model(folder / "model.gguf")
        shape = check_model_file(str(self.path)).shape
        self.draft = DraftFile("d.gguf", "dflash", shape, 1, longest=7, block=8, borrows=True)
        self.asked = 0
        self.memory_of: Collection[str] | None = None
        self.with_gpus()
        self.with_host(10**6)

    def with_gpus(self, *free: int) -> None:
        """GPUs with so many MiB free."""
        devices = tuple(
            BackendDevice(f"cuda:{i}", "a GPU", each * MIB, 1000 * MIB, 1)
            for i, each in enumerate(free)
        )

        def answer(memory_of: Collection[str] | None = None) -> tuple[BackendDevice, ...]:
            self.asked += 1
            self.memory_of = memory_of
            return devices

        self._monkeypatch.setattr(placement, "gpu_devices", answer)

    def with_host(self, available: int) -> None:
        host = HostMemory(available * MIB, 0)
        self._monkeypatch.setattr(placement, "host_memory", lambda: host)

    def place(self, *blocks: dict[str, Any]) -> list[Placed]:
        models = [
            ModelConfig(**{"path": str(self.path), "name": "abc"[i], "position": i} | block)
            for i, block in enumerate(blocks)
        ]
        files = [check_model_file(model.path) for model in models]
        drafts = [self.draft if model.draft is not None else None for model in models]
        return place_models(models, files, drafts)

    def devices(self, *blocks: dict[str, Any]) -> list[str]:
        return [",".join(map(str, placed.devices)) for placed in self.place(*blocks)]

    def refusal(self, *blocks: dict[str, Any]) -> str:
        with pytest.raises(PlacementError) as caught:
            self.place(*blocks)
        line = str(caught.value)
        assert "\n" not in line
        return line


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


# A block of the written model takes some 262 MiB of a GPU, nearly all of it the reserve.


def test_auto_is_the_first_gpu_with_room_for_weights_cache_and_computing(machine: Machine) -> None:
    machine.with_gpus(100, 300)
    assert machine.devices({}) == ["cuda:1"]
    machine.with_gpus(300, 950)
    assert machine.devices({}) == ["cuda:0"]
    large = {"max_ctx": 2**17, "max_concurrency": 8}
    assert machine.devices(large) == ["cuda:1"], "512 MiB of cache count"


def test_auto_is_the_cpu_where_no_gpu_has_room_and_says_so(machine: Machine) -> None:
    machine.with_gpus(100)
    (placed,) = machine.place({})
    assert placed.on_cpu
    assert "no GPU has 26" in placed.warnings[0]
    assert f"{machine.path} goes to the CPU" in placed.warnings[0]
    machine.with_gpus()
    (placed,) = machine.place({})
    assert (placed.on_cpu, placed.warnings) == (True, ())


def test_two_autos_count_each_other(machine: Machine) -> None:
    machine.with_gpus(400, 400)
    assert machine.devices({}, {}, {}) == ["cuda:0", "cuda:1", "cpu:0"]


def test_an_auto_leaves_room_for_a_device_that_a_later_block_names(machine: Machine) -> None:
    machine.with_gpus(400, 400)
    assert machine.devices({}, {"target_device": CUDA_0}) == ["cuda:1", "cuda:0"]


def test_a_named_device_without_room_is_refused_with_the_numbers_and_what_to_lower(
    machine: Machine,
) -> None:
    machine.with_gpus(300)
    line = machine.refusal({"target_device": CUDA_0, "max_ctx": 2**20})
    assert line.startswith(f"model block 1 (a): {machine.path} does not fit on cuda:0: it needs ")
    assert "KV cache 512, " in line
    assert "300 of 1000 MiB are free" in line
    assert "lower --max-ctx, --max-concurrency, --kv-pool-tokens or --gpu-layers" in line


def test_the_second_block_on_a_device_is_refused_beside_the_first(machine: Machine) -> None:
    machine.with_gpus(400)
    line = machine.refusal({"target_device": CUDA_0}, {"target_device": CUDA_0})
    assert line.startswith("model block 2 (b): ")
    assert "MiB for other models" in line


def test_of_gpus_that_share_a_model_the_one_without_room_is_named(machine: Machine) -> None:
    machine.with_gpus(900, 540)
    split: dict[str, Any] = {
        "target_devices": (CUDA_0, CUDA_1),
        "max_ctx": 2**16,
        "max_concurrency": 4,
    }
    line = machine.refusal(split)
    assert "does not fit on cuda:1" in line
    assert "change --target-layer-split" in line
    assert machine.devices(split | {"target_layer_split": (9.0, 1.0)}) == ["cuda:0,cuda:1"]


def test_a_device_that_is_not_there_is_refused_listing_those_that_are(machine: Machine) -> None:
    machine.with_gpus(300)
    for block in ({"target_device": CUDA_1}, {"target_devices": (CUDA_0, CUDA_1)}):
        line = machine.refusal(block)
        assert "there is no device cuda:1 here; this build and host have: cuda:0, cpu:0" in line


def test_gpus_are_not_even_asked_where_every_block_is_on_the_cpu(machine: Machine) -> None:
    machine.with_gpus(900)
    cpus = [{"target_device": DevicePlacement("cpu", i)} for i in range(2)]
    assert machine.devices(*cpus) == ["cpu:0", "cpu:1"]
    assert machine.asked == 0


def test_layers_for_a_gpu_need_one(machine: Machine) -> None:
    assert "--gpu-layers 3 needs a GPU" in machine.refusal({"gpu_layers": 3})


def test_a_cache_beyond_the_host_s_memory_is_refused_and_a_large_file_only_warned_of(
    machine: Machine,
) -> None:
    machine.with_host(100)
    line = machine.refusal({"max_ctx": 2**20})
    assert "does not fit into the memory of this host" in line
    assert "lower --max-ctx, --max-concurrency or --kv-pool-tokens" in line
    machine.path = write_model(
        machine.path.with_name("large.gguf"), layer_tensors={"attn_k.weight": 40 * 1024}
    )
    (placed,) = machine.place({})
    assert "may not fit" in placed.warnings[0]
    assert "does not fit" in machine.refusal({"mmap": False})
    assert "does not fit" in machine.refusal({"mlock": True})


# --------------------------------------------------------------- options of some architectures


def test_experts_are_kept_on_the_cpu_only_where_there_are_some(machine: Machine) -> None:
    line = machine.refusal({"cpu_moe": True})
    assert f"--cpu-moe keeps experts on the CPU, and {machine.path} (llama) has none" in line
    machine.path = write_model(
        machine.path.with_name("moe.gguf"),
        facts={"expert_count": 4, "expert_used_count": 2},
        layer_tensors={"ffn_up_exps.weight": 8},
    )
    assert machine.devices({"cpu_moe": True}) == ["cpu:0"]


DS4_OPTIONS: tuple[dict[str, Any], ...] = (
    {"ds4_fused_decode": True},
    {"ds4_expert_top_k": 6},
    {"ds4_prefill": "exact"},
)


@pytest.mark.parametrize("option", DS4_OPTIONS, ids=lambda option: next(iter(option)))
def test_options_of_deepseek_4_are_refused_by_name_on_other_architectures(
    machine: Machine, option: dict[str, Any]
) -> None:
    (name,) = option
    flag = f"--{name.replace('_', '-')}"
    line = machine.refusal(option)
    assert line == (
        f"model block 1 (a): {flag} is for the architecture deepseek4, and {machine.path} is of "
        "llama: leave it out"
    )


def deepseek4(machine: Machine, **facts: Any) -> None:
    machine.path = write_model(
        machine.path.with_name("ds4.gguf"),
        "deepseek4",
        facts={"expert_count": 8, "expert_used_count": 6, **facts},
        layer_tensors={"ffn_up_exps.weight": 8},
    )


def test_options_of_deepseek_4_are_accepted_on_it(machine: Machine) -> None:
    deepseek4(machine)
    assert machine.devices(*DS4_OPTIONS) == ["cpu:0"] * 3
    assert machine.devices({"ds4_expert_top_k": 2}) == ["cpu:0"]


def test_more_experts_than_there_are_is_refused(machine: Machine) -> None:
    deepseek4(machine)
    assert "is more than the 8 experts" in machine.refusal({"ds4_expert_top_k": 9})


def test_experts_that_are_looked_up_are_as_many_as_the_file_says(machine: Machine) -> None:
    deepseek4(machine, hash_layer_count=3)
    assert machine.devices({"ds4_expert_top_k": 6}) == ["cpu:0"]
    line = machine.refusal({"ds4_expert_top_k": 4})
    assert "first 3 layers look up 6 experts" in line
    assert "give 6 or leave it out" in line


def test_experts_that_differ_by_layer_are_not_overridden(machine: Machine) -> None:
    deepseek4(machine, expert_used_count=[6, 6, 6, 4])
    assert "says for each layer" in machine.refusal({"ds4_expert_top_k": 4})


# --------------------------------------------------------------------------------- peer access


PEERS: dict[str, Any] = {"target_devices": (CUDA_0, CUDA_1), "peer_access": True}


def test_peer_access_is_refused_where_the_build_has_no_switch_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.with_gpus(900, 900)
    monkeypatch.setattr(placement, "peer_access_variable", lambda: None)
    assert "--peer-access has no switch in this build" in machine.refusal(PEERS)
    assert machine.asked == 0


def test_peer_access_is_switched_on_before_the_gpus_are_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "DFLASH_TEST_PEER_ACCESS"
    monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setattr(placement, "peer_access_variable", lambda: name)
    seen: list[str] = []
    gpus = tuple(BackendDevice(f"cuda:{i}", "", 900 * MIB, 900 * MIB, 1) for i in range(2))

    def asked(memory_of: Collection[str] | None = None) -> tuple[BackendDevice, ...]:
        seen.append(os.environ[name])
        return gpus

    monkeypatch.setattr(placement, "gpu_devices", asked)
    assert machine.devices(PEERS) == ["cuda:0,cuda:1"]
    assert seen == ["1"]


def test_only_the_gpus_that_are_named_are_asked_for_their_memory(machine: Machine) -> None:
    machine.with_gpus(900, 900)
    machine.devices({"target_device": CUDA_1})
    assert machine.memory_of == {"cuda:1"}
    machine.devices({"target_device": CUDA_1}, {})  # the second may go anywhere
    assert machine.memory_of is None


# A draft takes some 266 MiB of a GPU, nearly all of it the reserve.


def test_a_draft_goes_where_its_target_is(machine: Machine) -> None:
    machine.with_gpus(900, 900)
    (placed,) = machine.place({"draft": "d.gguf", "target_device": CUDA_1})
    assert placed.draft is not None
    assert placed.draft.device == CUDA_1
    assert "; its draft d.gguf " in placed.shown()
    assert placed.shown().endswith(" on cuda:1")


def test_a_draft_goes_to_the_last_of_several_gpus_where_the_output_is(machine: Machine) -> None:
    machine.with_gpus(900, 900)
    (placed,) = machine.place({"draft": "d.gguf", "target_devices": (CUDA_0, CUDA_1)})
    assert placed.draft is not None
    assert placed.draft.device == CUDA_1


def test_auto_finds_a_gpu_with_room_for_model_and_draft_together(machine: Machine) -> None:
    machine.with_gpus(400, 900)
    assert machine.devices({}) == ["cuda:0"]
    assert machine.devices({"draft": "d.gguf"}) == ["cuda:1"]
    assert machine.devices({"draft": "d.gguf"}, {"draft": "d.gguf"}) == ["cuda:1", "cpu:0"]


def test_a_draft_without_room_is_refused_by_name(machine: Machine) -> None:
    machine.with_gpus(400)
    line = machine.refusal({"draft": "d.gguf", "target_device": CUDA_0})
    assert "the draft d.gguf does not fit on cuda:0" in line
    assert "MiB for other models" in line
    assert line.endswith("or leave --draft out")


@pytest.mark.parametrize("borrows", [True, False])
def test_a_draft_that_borrows_embeddings_stays_on_its_target_s_device(
    machine: Machine, borrows: bool
) -> None:
    machine.with_gpus(900, 900)
    machine.draft = evolve(machine.draft, borrows=borrows)
    for device in (CUDA_1, DevicePlacement("cpu", 0)):
        block = {"draft": "d.gguf", "target_device": CUDA_0, "draft_device": device}
        if borrows:
            line = machine.refusal(block)
            assert f"--draft-device {device}: d.gguf uses the embeddings of its model" in line
            assert "which is on cuda:0: leave --draft-device out" in line
        else:
            (placed,) = machine.place(block)
            assert placed.draft is not None
            assert placed.draft.device == device


def test_worker_groups_of_the_cpu_are_one_device(machine: Machine) -> None:
    cpus = {"target_device": DevicePlacement("cpu", 0), "draft_device": DevicePlacement("cpu", 1)}
    (placed,) = machine.place({"draft": "d.gguf"} | cpus)
    assert placed.draft is not None
    assert machine.asked == 0


def test_a_draft_s_device_that_is_not_there_is_refused(machine: Machine) -> None:
    machine.with_gpus(900)
    line = machine.refusal({"draft": "d.gguf", "target_device": CUDA_0, "draft_device": CUDA_1})
    assert "--draft-device: there is no device cuda:1 here" in line


def test_guesses_need_logits_and_a_draft_what_waits_for_it(machine: Machine) -> None:
    block: dict[str, Any] = {"max_concurrency": 8, "chunk": 16}
    (plain,) = machine.place(block)
    (drafted,) = machine.place(block | {"draft": "d.gguf"})
    assert drafted.needs.cpu.computing > plain.needs.cpu.computing
    assert drafted.draft is not None
    assert drafted.draft.needs.cpu.computing >= 2 * MOST_PENDING_BYTES
    machine.draft = evolve(machine.draft, feature_bytes=92_160)
    (wide,) = machine.place(block | {"draft": "d.gguf"})
    assert wide.draft is not None
    more = wide.draft.needs.cpu.computing - drafted.draft.needs.cpu.computing
    # A step of the target is a chunk, and the tokens of 8 sequences with guesses.
    step = (16 + 63) * 92_160
    assert more >= step + pending_bytes(step) - pending_bytes(0)
