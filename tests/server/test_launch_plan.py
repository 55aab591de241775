"""The plan of a launch: what --check prints and a start announces, before anything is loaded."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import attrs
import pytest

from dflash_trio import launch_checks, server
from dflash_trio.cli import parse_command_line
from dflash_trio.config import ServerConfig
from dflash_trio.engine import placement
from dflash_trio.engine.host_memory import HostMemory
from dflash_trio.engine.llama_abi import BackendDevice
from dflash_trio.engine.memory_plan import MIB
from dflash_trio.launch_checks import StartupError, resolve_launch
from dflash_trio.launch_plan import LaunchPlan
from dflash_trio.net.listener import bind_listeners
from dflash_trio.plan_text import banner, load_detail, render_check, render_json
from tests.engine.written_models import write_model
from tests.support.written_drafts import (
    tiny_tokenizer,
    tokenizer_of,
    write_dflash,
    write_target,
)

CORES = 4


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model trained on 4096 tokens, on a host with four cores and a GPU."""
    monkeypatch.setattr(launch_checks, "usable_cores", lambda: CORES)
    monkeypatch.setattr(placement, "host_memory", lambda: HostMemory(10**6 * MIB, 0))
    gpu = BackendDevice("cuda:0", "a GPU", 900 * MIB, 1000 * MIB, 1)
    monkeypatch.setattr(placement, "gpu_devices", lambda _named=None: (gpu,))
    return str(write_model(tmp_path / "model.gguf"))


def configuration(*words: str) -> ServerConfig:
    return parse_command_line(words, {}).config


def plan_of(*words: str) -> LaunchPlan:
    return resolve_launch(configuration(*words))


def warnings_of(*words: str) -> list[str]:
    return list(plan_of(*words).lines_of_warning())


def test_a_model_that_takes_its_defaults_warns_of_nothing(model: str) -> None:
    plan = plan_of(model, "--target-device=cpu:0")
    (each,) = plan.models
    assert list(plan.lines_of_warning()) == []
    assert (each.context.max_ctx, each.context.slots, each.context.pool) == (4096, 1, 4096)
    assert (each.threads, each.partitioned, each.devices) == (CORES, True, ("cpu:0",))


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("127.1", None),
        ("0x7f000001", None),
        ("2130706433", None),
        ("LocalHost.", None),
        ("unix:/x", None),
        ("0.0.0.0", "--host 0.0.0.0 can be reached from other machines"),
        ("::", "--host :: can be reached from other machines"),
        ("my.name", "unless --host my.name stands for this machine's loopback only"),
    ],
)
def test_who_may_reach_it_without_a_key_is_told_however_the_address_is_spelled(
    model: str, host: str, says: str | None
) -> None:
    words = (model, "--target-device=cpu:0", f"--host={host}")
    told = warnings_of(*words)
    assert len(told) == (says is not None)
    assert all(says in line for line in told if says)
    assert warnings_of(*words, "--api-key=k") == []


@pytest.mark.parametrize("on_loopback", [True, False])
def test_once_it_is_bound_the_address_and_not_the_name_decides(
    model: str, on_loopback: bool
) -> None:
    plan = plan_of(model, "--target-device=cpu:0", "--host=my.name")
    told = list(attrs.evolve(plan, on_loopback=on_loopback).lines_of_warning())
    assert ["my.name can be reached from other machines" in line for line in told] == (
        [] if on_loopback else [True]
    )


def test_a_start_warns_by_what_it_has_bound(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Told:
        """A server that only hears what it would tell."""

        abandoned_engines = ()

        def __init__(self, *_: object, plan: LaunchPlan, **__: object) -> None:
            told.extend(plan.lines_of_warning())

        async def run(self) -> int:
            return 0

    plan = plan_of(model, "--target-device=cpu:0", "--host=my.name", "--port=0")
    assert len(list(plan.lines_of_warning())) == 1
    monkeypatch.setattr(server, "Server", Told)
    monkeypatch.setattr(server, "bind", lambda _: bind_listeners("127.0.0.1", 0))
    monkeypatch.setattr(server, "give_large_blocks_back", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert server.serve(plan.config, [], plan) == 0
    assert told == []


def test_every_value_of_a_model_is_there_for_machines(model: str) -> None:
    words = ("--max-concurrency=4", "--kv-pool-tokens=5000", "--cache-type-k=q8_0", "--alias=fast")
    plan = plan_of(model, "--target-device=cpu:3", *words)
    text = render_json(plan)
    assert text.isascii()
    assert text.count("\n") == 1
    (each,) = json.loads(text)["models"]
    (memory,) = each.pop("memory")
    assert memory["device"] == "cpu:3"
    parts = memory["weights"], memory["kv_cache"], memory["computing"]
    assert min(parts) > 0
    assert sum(parts) == memory["total"]
    assert each == {
        "name": "model", "aliases": ["fast"], "block": 1, "priority": 0, "primary": True,
        "path": model, "size_bytes": Path(model).stat().st_size, "architecture": "llama",
        "devices": ["cpu:3"], "threads": CORES, "trained_ctx": 4096, "max_ctx": 4096,
        "max_concurrency": 4, "kv_pool_tokens": 5000, "kv_pool_partitioned": False,
        "cache_type_k": "q8_0", "cache_type_v": "f16", "on_sigterm": "finalize",
        "draft": None, "model_card": None, "from_card": {},
    }  # fmt: skip


def test_models_stand_in_the_order_in_which_they_are_tried(model: str) -> None:
    plan = plan_of(
        "--load-balancing", "--load-balancing-primary-gpu=cpu:1",
        "--model", model, "--model-name=a", "--target-device=cpu:0",
        "--model", model, "--model-name=b", "--target-device=cpu:1",
    )  # fmt: skip
    document = json.loads(render_json(plan))
    assert [(each["name"], each["block"], each["primary"]) for each in document["models"]] == [
        ("b", 2, True),
        ("a", 1, False),
    ]
    assert document["load_balancing"]
    lines = render_check(plan).splitlines()
    assert lines.index("1. b (primary)") < lines.index("2. a")
    assert [line.split(":")[0] for line in banner(plan)] == ["dflash-server 0.1.0", "1. b", "2. a"]


def test_blocks_that_do_not_load_are_named_and_not_opened(model: str) -> None:
    plan = plan_of("--model", model, "--model=nowhere.gguf", "--model-name=other")
    assert json.loads(render_json(plan))["unused_models"] == ["other"]
    assert "not loaded and not checked: other" in render_check(plan)


def test_memory_is_told_for_each_device_and_for_all_models_together(model: str) -> None:
    plan = plan_of(
        *("--load-balancing", "--model", model, "--model-name=a", "--target-device=cuda:0"),
        *("--model", model, "--model-name=b", "--target-device=cpu:0"),
        *("--model", model, "--model-name=c", "--target-device=cpu:1"),
    )
    devices = [[device for device, _ in each.memory] for each in plan.models]
    assert devices == [["cuda:0", "host"], ["cpu:0"], ["cpu:1"]]
    needs = [need.total for each in plan.models for _, need in each.memory]
    assert plan.memory == {"cuda:0": needs[0], "host": sum(needs[1:])}
    assert [each.threads for each in plan.models] == [2, 2, 2], "only the CPU's blocks share cores"


def test_what_holds_because_the_card_says_it_is_named(model: str, tmp_path: Path) -> None:
    (tmp_path / "model.card.toml").write_text(
        '[sampling]\ntop-k = 20\nmin-p = 0\n[limits]\ndefault-max-tokens = 100000\n'
        '[reasoning]\nreasoning-effort-low = 7\n[chat]\nturn-ends = ["<end>"]\n'
    )  # fmt: skip
    plan = plan_of(model, "--top-k=30")
    assert plan.models[0].from_card == {
        "min-p": 0,
        "default-max-tokens": 4096,
        "reasoning-effort-low": 7,
        "turn-ends": ["<end>"],
    }
    text = render_check(plan)
    assert str(tmp_path / "model.card.toml") in text
    assert 'turn-ends ["<end>"]' in text
    assert "top-k" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-ctx=4097",), "--max-ctx 4097 is beyond the 4096 tokens"),
        (("--kv-pool-tokens=4095",), "less than one context of 4096 tokens"),
        (("--kv-pool-tokens=4097",), "more than --max-concurrency x --max-ctx can use"),
        (("--threads=5",), "--threads 5 is more than the 4 usable cores"),
        (("--host=0.0.0.0",), "there is no API key, and --host 0.0.0.0"),
    ],
)
def test_what_is_not_what_it_looks_like_is_warned_of(
    model: str, words: tuple[str, ...], says: str
) -> None:
    (warning,) = warnings_of(model, "--target-device=cpu:0", *words)
    assert says in warning
    plan = plan_of(model, "--target-device=cpu:0", *words)
    assert warning in render_check(plan)
    assert json.loads(render_json(plan))["warnings"] == [warning]


@pytest.mark.parametrize(
    "words",
    [
        ("--max-ctx=4096", "--kv-pool-tokens=4096", "--threads=4"),
        ("--max-concurrency=2", "--kv-pool-tokens=4096"),
        ("--host=0.0.0.0", "--api-key=k"),
        ("--host=unix:/run/x.sock",),
        ("--host=::1",),
    ],
)
def test_what_is_just_within_bounds_is_not(model: str, words: tuple[str, ...]) -> None:
    assert warnings_of(model, "--target-device=cpu:0", *words) == []


def two_on_the_cpu(model: str, *threads: str) -> list[str]:
    words = ["--load-balancing"]
    for name, count in zip("ab", threads, strict=True):
        words += ["--model", model, "--model-name", name, "--target-device=cpu:0"]
        words += [f"--threads={count}"] if count else []
    return warnings_of(*words)


def test_models_on_the_same_cores_are_warned_of(model: str) -> None:
    (warning,) = two_on_the_cpu(model, "4", "")
    assert warning.startswith("a and b are on the same 4 cores with 6 threads together")
    assert two_on_the_cpu(model, "", "") == []
    assert two_on_the_cpu(model, "3", "1") == []


def test_more_models_than_cores_are_on_the_same_cores(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_checks, "usable_cores", lambda: 1)
    (warning,) = two_on_the_cpu(model, "", "")
    assert "on the same 1 cores with 2 threads" in warning


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ((), "http://127.0.0.1:8080"),
        (("--host=::1", "--port=1"), "http://[::1]:1"),
        (("--port=0",), "http://127.0.0.1:any free port"),
        (("--host=unix:/run/a.sock",), "unix:/run/a.sock"),
    ],
)
def test_the_address_is_shown_and_nothing_is_bound(
    model: str, words: tuple[str, ...], address: str
) -> None:
    plan = plan_of(model, *words)
    assert plan.address == address
    assert f"{address} (whether it is free was not checked)" in render_check(plan)


def test_keys_are_counted_and_never_shown(model: str) -> None:
    plan = plan_of(model, "--api-key=secret-1", "--api-key=secret-2", "--drain-timeout=7.5")
    for text in (render_check(plan), render_json(plan), *banner(plan)):
        assert "secret" not in text
    assert "2 API keys, 32 requests may wait, a shutdown waits for answers 7.5 s at most" in (
        render_check(plan)
    )


def test_a_path_that_ends_lines_stays_in_its_line(model: str, tmp_path: Path) -> None:
    odd = tmp_path / "a\nb\x1b[31m.gguf"
    Path(model).rename(odd)
    plan = plan_of(str(odd), "--model-name=odd")
    for line in (*render_check(plan).splitlines(), *banner(plan)):
        assert line.isprintable()
    assert "a\\nb" in render_check(plan)


def test_loading_says_how_much_goes_where(model: str) -> None:
    plan = plan_of(model, "--target-device=cuda:0")
    size = -(-Path(model).stat().st_size // MIB)
    assert load_detail(plan.models[0]) == f"{size} MiB to cuda:0"


def test_a_draft_that_loads_nothing_is_named_and_takes_nothing(model: str) -> None:
    plan = plan_of(model, "--target-device=cpu:0", "--draft=prompt-lookup")
    assert json.loads(render_json(plan))["models"][0]["draft"] == {
        "kind": "prompt-lookup",
        "path": None,
        "device": None,
        "lazy": False,
        "tree_budget": None,
        "memory": [],
    }
    assert "prompt-lookup, which loads nothing" in render_check(plan)
    assert "drafts by prompt-lookup" in list(banner(plan))[1]


@pytest.mark.parametrize("architecture", ["qwen35", "mamba2"])
@pytest.mark.parametrize("draft", ["prompt-lookup", "./prompt-lookup", "draft.gguf"])
def test_a_model_that_cannot_take_tokens_back_is_refused_every_draft_with_the_same_words(
    tmp_path: Path, architecture: str, draft: str
) -> None:
    path = write_model(tmp_path / "model.gguf", architecture)
    with pytest.raises(StartupError) as caught:
        plan_of(str(path), f"--draft={draft}")
    assert str(caught.value) == (
        f"model block 1 (model): {path} ({architecture}) keeps a recurrent state and cannot take "
        f"tokens back, as drafts want it: leave --draft {draft} out"
    )


LOOKUP = ("--target-device=cpu:0", "--draft=prompt-lookup")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--draft-max=63",),
            "--draft-max 63: at most 62 tokens are guessed at a time here, since a step that "
            "verifies has at most 63 tokens on a CPU: lower it",
        ),
        (
            ("--max-concurrency=63",),
            "--max-concurrency 63: while more than 62 sequences decode, nothing is guessed, since "
            "a step that verifies has at most 63 tokens on a CPU: lower it to 62, or leave --draft "
            "out",
        ),
        (
            ("--decode-headroom=16",),
            "--decode-headroom 16 leaves no room for the 16 tokens that --draft may guess at a "
            "time: fewer are guessed",
        ),
    ],
)
def test_guesses_that_are_asked_for_and_never_made_are_warned_of(
    model: str, words: tuple[str, ...], says: str
) -> None:
    assert warnings_of(model, *LOOKUP, *words) == [f"model block 1 (model): {says}"]


@pytest.mark.parametrize(
    "words",
    [
        ("--draft-max=62",),
        ("--max-concurrency=62",),
        ("--decode-headroom=17",),
        ("--draft-max=62", "--decode-headroom=63"),
    ],
)
def test_guesses_that_can_just_be_made_are_not(model: str, words: tuple[str, ...]) -> None:
    assert warnings_of(model, *LOOKUP, *words) == []


def test_room_is_missed_only_for_guesses_that_a_step_can_verify(model: str) -> None:
    (warning,) = warnings_of(model, *LOOKUP, "--draft-max=200", "--decode-headroom=63")
    assert "--draft-max 200" in warning


def test_a_gpu_verifies_more(model: str) -> None:
    words = [model, "--target-device=cuda:0", "--draft=prompt-lookup", "--decode-headroom=400"]
    assert warnings_of(*words, "--draft-max=255", "--max-concurrency=255", "--max-ctx=512") == []
    (warning,) = warnings_of(*words, "--draft-max=256")
    assert "at most 255 tokens are guessed at a time" in warning
    assert "at most 256 tokens on a GPU" in warning
    (warning,) = warnings_of(*words, "--max-concurrency=256", "--max-ctx=512")
    assert "while more than 255 sequences decode, nothing is guessed" in warning


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--draft-max=62", "--max-concurrency=31"), []),
        (("--draft-max=63",), ["--draft-max 63: at most 62 tokens"]),
        (("--max-concurrency=32",), ["more than 31 sequences decode, hardly anything is guessed"]),
    ],
)
def test_a_draft_from_a_file_wants_a_guess_for_each_sequence(
    model: str, tmp_path: Path, words: tuple[str, ...], says: list[str]
) -> None:
    target = write_target(tmp_path / "target.gguf", tiny_tokenizer(300))
    found = warnings_of(str(target), "--target-device=cpu:0", f"--draft={target}", *words)
    assert [part in line for part, line in zip(says, found, strict=True)] == [True] * len(says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ddtree-budget=62",), []),
        (
            ("--ddtree-budget=63",),
            ["--ddtree-budget 63: a tree has at most 62 tokens here, since a step that verifies"],
        ),
        (
            ("--max-concurrency=63",),
            ["which leaves no branches; guesses are chains", "more than 31 sequences decode"],
        ),
    ],
)
def test_trees_that_cannot_be_verified_are_warned_of(
    model: str, tmp_path: Path, words: tuple[str, ...], says: list[str]
) -> None:
    target = write_target(tmp_path / "target.gguf", tiny_tokenizer(300))
    draft = write_dflash(tmp_path / "draft.gguf", tiny_tokenizer(300))
    drafted = ["--target-device=cpu:0", f"--draft={draft}", "--ddtree"]
    found = warnings_of(str(target), *drafted, *words)
    assert [part in line for part, line in zip(says, found, strict=True)] == [True] * len(says)


@pytest.mark.real
def test_a_draft_is_placed_and_counted_beside_its_model(smollm2: Path) -> None:
    plan = plan_of(str(smollm2), "--target-device=cpu:0", f"--draft={smollm2}", "--lazy-draft")
    (each,) = json.loads(render_json(plan))["models"]
    assert (each["draft"]["path"], each["draft"]["device"]) == (str(smollm2), "cpu:0")
    (memory,) = each["draft"]["memory"]
    assert plan.memory == {"host": each["memory"][0]["total"] + memory["total"]}
    assert f"{smollm2}: draft-model on cpu:0, loaded when a request comes" in render_check(plan)


@pytest.mark.real
def test_trees_make_all_slots_share_the_cells_and_are_in_the_plan(
    smollm2: Path, tmp_path: Path
) -> None:
    draft = write_dflash(tmp_path / "d.gguf", tokenizer_of(smollm2), wide=576)
    words = [str(smollm2), "--target-device=cpu:0", f"--draft={draft}", "--max-concurrency=4"]
    chains, trees = plan_of(*words), plan_of(*words, "--ddtree", "--ddtree-budget=12")
    (ours,), (theirs,) = (json.loads(render_json(plan))["models"] for plan in (trees, chains))
    assert (ours["kv_pool_partitioned"], theirs["kv_pool_partitioned"]) == (False, True)
    assert ours["kv_pool_tokens"] == theirs["kv_pool_tokens"]
    assert (ours["draft"]["tree_budget"], theirs["draft"]["tree_budget"]) == (12, None)
    # The masks are over the cells of all slots, and there are more outputs.
    assert ours["memory"][0]["computing"] > theirs["memory"][0]["computing"]
    assert ours["memory"][0]["kv_cache"] == theirs["memory"][0]["kv_cache"]
    assert "dflash on cpu:0, in trees of at most 12 tokens" in render_check(trees)


@pytest.mark.parametrize("other", [None, "{{ messages[0].content }}"])
def test_a_template_of_the_file_that_does_not_compile_is_found_before_loading(
    tmp_path: Path, other: str | None
) -> None:
    path = write_model(tmp_path / "model.gguf", chat_template="{% fxx %}")
    words = [str(path), "--target-device", "cpu:0"]
    if other is not None:
        template = tmp_path / "other.jinja"
        template.write_text(other)
        plan_of(*words, "--chat-template-file", str(template))
        return
    with pytest.raises(StartupError, match=r"bad chat template: .*fxx.*model\.gguf's own"):
        plan_of(*words)
