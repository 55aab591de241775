"""Which models load, what is refused on them, and what configuration comes out."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from dflash_trio.cli.option import Option, Scope
from dflash_trio.config import (
    DevicePlacement,
    ListenerConfig,
    ModelCard,
    ModelConfig,
    SamplingDefaults,
    ServerConfig,
)
from tests.cli.cli_cases import ONE_VALUE, PER_MODEL, UNAVAILABLE, good_value, parse, refusal_of

TWO = "--model a.gguf --target-device hip:0 --model b.gguf --target-device hip:1"
QWEN_AND_DS4 = """
  --load-balancing --load-balancing-primary-gpu {primary}
  --model /models/qwen38-27b.gguf
  --model-name qwen --target-device hip:0 {qwen_draft}
  --max-ctx 4096 --max-concurrency 4 --kv-pool-tokens 16384
  --cache-type-k q8_0 --cache-type-v q8_0 --fa-window 0
  --default-max-tokens 2048 --hard-limit-reply-budget 1024
  --host 127.0.0.1 --port 8080 --routing-queue-limit 32
  --model /models/deepseek-v4-flash.gguf
  --model-name ds4 --target-device hip:1
  --max-ctx 8192 --max-concurrency 1
  --default-max-tokens 2048 --hard-limit-reply-budget 1024
  --prefix-cache-slots 0 --prefill-cache-slots 0 --disk-prefix-cache off {ds4_flags}
"""
PARTS = {
    "qwen_draft": "--draft /models/qwen38-dflash2.gguf --draft-device hip:0",
    "ds4_flags": "--ds4-fused-decode --ds4-expert-top-k 6 --ds4-prefill exact",
}


def by_name(option: Option) -> str:
    return option.name


def names(line: str) -> list[str]:
    return [model.name for model in parse(line).config.models]


# Choosing the primary and what loads


def test_without_balancing_only_the_first_block_loads() -> None:
    launch = parse(TWO)
    assert [model.name for model in launch.config.models] == ["a"]
    assert launch.config.unused == ("b",)
    assert not launch.config.load_balancing


def test_the_chosen_primary_loads_instead_and_enables_no_balancing() -> None:
    launch = parse(f"--load-balancing-primary-gpu hip:1 {TWO}")
    assert [(model.name, model.position) for model in launch.config.models] == [("b", 1)]
    assert launch.config.unused == ("a",)
    assert not launch.config.load_balancing


def test_with_balancing_all_load_the_primary_first_and_the_rest_as_configured() -> None:
    three = f"--load-balancing {TWO} --model c.gguf --target-device cpu:0"
    assert names(three) == ["a", "b", "c"]
    assert names(f"{three} --load-balancing-primary-gpu cpu:0") == ["c", "a", "b"]
    assert parse(three).config.unused == ()


def test_choosing_the_primary_moves_no_model() -> None:
    one = parse(f"--load-balancing {TWO}").config
    other = parse(f"--load-balancing --load-balancing-primary-gpu hip:1 {TWO}").config
    assert set(one.models) == set(other.models)
    assert one.models == other.models[::-1]


def test_balancing_needs_two_blocks() -> None:
    message = refusal_of("--load-balancing a.gguf")
    assert message.startswith("--load-balancing needs at least two model blocks")


@pytest.mark.parametrize("balancing", ["", "--load-balancing"])
def test_a_primary_that_no_block_is_placed_on_is_refused_listing_the_devices(
    balancing: str,
) -> None:
    message = refusal_of(f"{balancing} --load-balancing-primary-gpu cuda:0 {TWO} --model c.gguf")
    assert message.startswith("--load-balancing-primary-gpu cuda:0 matches no block")
    for written in ("hip:0 in model block 1 (a)", "hip:1 in model block 2 (b)", "auto in model"):
        assert written in message


def test_auto_matches_nothing() -> None:
    for line in ("a.gguf", "a.gguf --target-device auto"):
        message = refusal_of(f"--load-balancing-primary-gpu auto {line}")
        assert "auto matches no block" in message
        assert "cuda:0 matches no block" in refusal_of(
            f"--load-balancing-primary-gpu cuda:0 {line}"
        )


def test_a_primary_that_two_blocks_are_placed_on_is_refused_naming_them() -> None:
    message = refusal_of(
        "--load-balancing-primary-gpu hip:0 a.gguf --target-device hip:0 "
        "--model b.gguf --target-device hip:00"
    )
    assert "hip:0 matches model block 1 (a) and model block 2 (b)" in message


@pytest.mark.parametrize(
    "line",
    ["", "--port 1", "--load-balancing", "--check", "--max-ctx 4", "--log-level info"],
)
def test_a_launch_without_a_model_is_refused(line: str) -> None:
    assert "name a GGUF file" in refusal_of(line)


# Names


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/qwen.gguf", "qwen"),
        ("qwen.Q4_K_M.gguf", "qwen.Q4_K_M"),
        ("/m/big-00001-of-00003.gguf", "big"),
        ("/m/big-1-of-3.gguf", "big-1-of-3"),
        ("model", "model"),
        ("über 🦙.gguf", "über 🦙"),
    ],
)
def test_a_model_is_named_after_its_file(path: str, name: str) -> None:
    assert parse(f"'{path}'").config.models[0].name == name


@pytest.mark.parametrize("name", ["a b", "org/model:tag", "🦙", "x" * 128, "é"])
def test_any_printable_name_is_allowed(name: str) -> None:
    assert parse(f"a.gguf --model-name '{name}'").config.models[0].name == name
    assert parse(f"a.gguf --alias '{name}'").config.models[0].aliases == (name,)


@pytest.mark.parametrize("name", ["", "   ", "x" * 129, "a\nb", "a\tb", "\x1b[31m", "\udc80"])
@pytest.mark.parametrize("flag", ["--model-name", "--alias"])
def test_a_name_that_cannot_be_shown_is_refused(flag: str, name: str) -> None:
    message = refusal_of(["a.gguf", flag, name])
    assert message.startswith(flag)
    assert "model block 1" in message


@pytest.mark.parametrize("path", ["a\nb.gguf", "/", "x" * 200 + ".gguf"])
def test_a_file_whose_stem_is_no_name_needs_a_model_name(path: str) -> None:
    assert refusal_of([path]).endswith("give --model-name NAME")
    parse_named = ["--model", path, "--model-name", "good"]
    assert names(" ".join(f"'{word}'" for word in parse_named)) == ["good"]


@pytest.mark.parametrize(
    "second",
    [
        "--model x/a.gguf",
        "--model a.gguf",
        "--model b.gguf --model-name a",
        "--model b.gguf --alias a",
        "--model b.gguf --alias other",
        "--model b.gguf --model-name other",
    ],
)
def test_names_and_aliases_are_unique_over_loaded_blocks(second: str) -> None:
    message = refusal_of(f"--load-balancing a.gguf --alias other {second}")
    assert "is already that of model block 1 (model block 2 (" in message
    assert "--model-name" in message
    assert parse(f"a.gguf --alias other {second}").config.unused


def test_a_block_gives_each_of_its_names_once() -> None:
    assert "the name a is given twice" in refusal_of("a.gguf --alias a")
    assert "the name b is given twice" in refusal_of("a.gguf --alias b --alias b")


def test_the_same_file_may_serve_under_two_names() -> None:
    assert names("--load-balancing a.gguf --model a.gguf --model-name b") == ["a", "b"]


# What is not available, or not together


@pytest.mark.parametrize("option", UNAVAILABLE, ids=by_name)
def test_what_is_not_available_yet_is_refused_by_name(option: Option) -> None:
    message = refusal_of(["a.gguf", "--model-name", "qwen", option.flag, *good_value(option)])
    place = " (model block 1 (qwen))" if option.scope.per_model else ""
    what, _, remedy = message.rpartition(": ")
    assert what == f"{option.flag} is not available yet{place}"
    assert remedy.startswith("leave it out")


@pytest.mark.parametrize("option", ONE_VALUE, ids=by_name)
def test_a_value_that_is_not_available_yet_is_refused_naming_the_one_that_is(
    option: Option,
) -> None:
    (value,) = good_value(option)
    message = refusal_of(["a.gguf", option.flag, value])
    assert message.startswith(
        f"{option.flag} {value} is not available yet (model block 1 (a)): only {option.only_value}"
    )
    parse(f"a.gguf {option.flag} {option.only_value}")


@pytest.mark.parametrize("option", [o for o in PER_MODEL if not o.available], ids=by_name)
def test_a_second_loaded_block_is_judged_too(option: Option) -> None:
    words = ["--load-balancing", "a.gguf", "--model", "b.gguf", option.flag, *good_value(option)]
    assert "(model block 2 (b))" in refusal_of(words)


@pytest.mark.parametrize(
    "option", [o for o in PER_MODEL if o.scope is Scope.SINGLE_MODEL], ids=by_name
)
def test_process_wide_policy_is_refused_beside_balancing(option: Option) -> None:
    words = ["--load-balancing", "a.gguf", "--model", "b.gguf", option.flag, *good_value(option)]
    message = refusal_of(words)
    assert message.startswith(f"{option.flag} sets policy for the whole process")
    assert "--load-balancing (model block 2 (b))" in message


def test_a_remote_draft_is_refused_beside_balancing() -> None:
    message = refusal_of("--load-balancing a.gguf --draft-device rpc:host:50052 --model b.gguf")
    assert message.startswith("--draft-device rpc:host:50052 is remote")
    assert "(model block 1 (a))" in message


def test_a_remote_draft_is_not_there_yet_without_balancing_either() -> None:
    message = refusal_of("a.gguf --draft d.gguf --draft-device rpc:host:50052")
    assert message.startswith("--draft-device rpc:host:50052 is remote, and drafts on other hosts")


@pytest.mark.parametrize(
    "option", ["--draft-device cpu:0", "--draft-max 3", "--ddtree", "--lazy-draft"]
)
def test_options_of_a_draft_want_one(option: str) -> None:
    message = refusal_of(f"a.gguf {option}")
    assert message.startswith(f"{option.split()[0]} has no draft to be about (model block 1 (a))")
    parse(f"a.gguf --draft d.gguf {option}")


@pytest.mark.parametrize("option", ["--draft-device cpu:0", "--lazy-draft"])
def test_prompt_lookup_has_no_device_and_nothing_to_load(option: str) -> None:
    message = refusal_of(f"a.gguf --draft prompt-lookup {option}")
    assert message.startswith(f"{option.split()[0]} has no meaning with --draft prompt-lookup")
    (model,) = parse("a.gguf --draft prompt-lookup --draft-max 3").config.models
    assert (model.draft, model.draft_file, model.draft_max) == ("prompt-lookup", None, 3)
    (model,) = parse("a.gguf --draft ./prompt-lookup").config.models
    assert model.draft_file == "./prompt-lookup"


def test_a_tree_wants_a_draft_and_its_budget_wants_a_tree() -> None:
    (model,) = parse("a.gguf --draft d.gguf").config.models
    assert model.tree_budget is None
    (model,) = parse("a.gguf --draft d.gguf --ddtree").config.models
    assert model.tree_budget == 22
    (model,) = parse("a.gguf --draft d.gguf --ddtree --ddtree-budget 7").config.models
    assert model.tree_budget == 7
    message = refusal_of("a.gguf --draft d.gguf --ddtree-budget 7")
    assert message.startswith("--ddtree-budget has no tree to be about")


def test_prompt_lookup_makes_no_trees() -> None:
    message = refusal_of("a.gguf --draft prompt-lookup --ddtree")
    assert message.startswith("--ddtree has no meaning with --draft prompt-lookup")


def test_trees_leave_room_for_their_branches_among_the_sequences() -> None:
    parse("a.gguf --draft d.gguf --ddtree --max-concurrency 240")
    message = refusal_of("a.gguf --draft d.gguf --ddtree --max-concurrency 241")
    assert message.startswith("--ddtree has no sequence ids left beside --max-concurrency 241")


def test_unused_blocks_give_one_warning_in_all() -> None:
    launch = parse(
        "a.gguf --model b.gguf --kvflash auto --draft x --model c.gguf --chat-template-file /none"
    )
    (warning,) = launch.warnings
    assert "model block 2 (b) and model block 3 (c) do not load" in warning
    assert warning.isprintable()


def test_a_launch_that_loads_everything_warns_of_nothing() -> None:
    assert parse(f"--load-balancing {TWO}").warnings == ()
    assert parse("a.gguf").warnings == ()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"])
def test_a_quantized_v_cache_needs_flash_attention(kind: str) -> None:
    message = refusal_of(f"a.gguf --flash-attn off --cache-type-v {kind}")
    assert message.startswith(f"--cache-type-v {kind} needs flash attention")
    parse(f"a.gguf --flash-attn on --cache-type-v {kind}")
    parse(f"a.gguf --cache-type-v {kind}")
    parse(f"a.gguf --flash-attn off --cache-type-k {kind}")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_a_plain_v_cache_needs_no_flash_attention(kind: str) -> None:
    parse(f"a.gguf --flash-attn off --cache-type-v {kind}")


def test_gpus_that_share_a_model_are_named_with_their_shares() -> None:
    (model,) = parse(
        "a.gguf --target-devices cuda:0,cuda:1 --target-layer-split 3,1.5 --peer-access"
    ).config.models
    assert [str(device) for device in model.target_devices] == ["cuda:0", "cuda:1"]
    assert (model.target_layer_split, model.peer_access) == ((3.0, 1.5), True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--target-layer-split 1,1", "--target-layer-split has a meaning for several devices only"),
        ("--peer-access", "--peer-access has a meaning for several devices only"),
        ("--target-devices hip:0,hip:1 --target-device hip:0", "contradicts --target-device"),
        ("--target-devices hip:0,hip:00", "names a device twice"),
        ("--target-devices hip:0,cpu:0", "has the CPU among the GPUs"),
        ("--target-devices hip:0,hip:1 --target-layer-split 1,1,1", "has 3 weights for 2 devices"),
        ("--target-devices vulkan:0,vulkan:1 --peer-access", "vulkan:0 is neither"),
    ],
)
def test_a_split_that_means_nothing_is_refused(words: str, says: str) -> None:
    message = refusal_of(f"a.gguf {words}")
    assert says in message
    assert "model block 1 (a)" in message


@pytest.mark.parametrize(
    "words", ["--target-devices hip:0,hip:1", "--target-layer-split 1,1", "--peer-access"]
)
def test_a_split_never_stands_beside_balancing(words: str) -> None:
    message = refusal_of(f"--load-balancing a.gguf --model b.gguf {words}")
    assert message.startswith(words.split()[0])
    assert "cannot stand beside --load-balancing" in message


def test_a_split_of_an_unused_block_is_not_judged() -> None:
    assert parse("a.gguf --model b.gguf --peer-access").config.unused == ("b",)


def test_layers_for_a_gpu_need_one() -> None:
    assert "--gpu-layers 3" in refusal_of("a.gguf --target-device cpu:0 --gpu-layers 3")
    parse("a.gguf --target-device cpu:0 --gpu-layers 0")
    parse("a.gguf --gpu-layers 3")


@pytest.mark.parametrize("text", ["cuda", "cuda:", "cuda:x", "gpu:0", "cuda:-1", "", "CPU:0"])
def test_what_is_no_device_is_refused_with_the_backends(text: str) -> None:
    message = refusal_of(["a.gguf", "--target-device", text])
    assert "is no device (model block 1 (a))" in message
    assert "cuda, hip, vulkan, metal, sycl, cpu" in message


# The listener


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("localhost", "localhost"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:/my run/x y.sock", "unix:/my run/x y.sock"),
    ],
)
def test_hosts_are_addresses_names_or_unix_sockets(text: str, host: str) -> None:
    assert parse(shlex.join(["a.gguf", "--host", text])).config.listener.host == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:" + "x" * 108,
        "127.0.0.1:80",
        "http://x",
        "a b",
        "[]",
        "x\ny",
        "unix:/x\ny",
    ],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    assert refusal_of(["a.gguf", "--host", text]).startswith("--host ")


def test_a_unix_socket_has_no_port() -> None:
    assert refusal_of("a.gguf --host unix:/x --port 1").startswith("--port has no meaning")


@pytest.mark.parametrize(("one", "other"), [("cert", "key"), ("key", "cert")])
def test_half_of_a_tls_identity_is_refused(one: str, other: str) -> None:
    message = refusal_of(f"a.gguf --tls-{one} x.pem")
    assert message.startswith(f"--tls-{one} is given without --tls-{other}")


def test_a_key_is_never_shown() -> None:
    for key in ("", "hunter2\n", " hunter2", "hunter2 ", "hun\x00ter2"):
        message = refusal_of(["a.gguf", "--api-key", key])
        assert message.startswith("--api-key ")
        assert "hun" not in message
        environment = refusal_of("a.gguf", {"DFLASH_API_KEY": key})
        assert "environment variable DFLASH_API_KEY" in environment
        assert "hun" not in environment


def test_keys_come_from_options_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\nfile-1\r\n\n  file-2  \n")
    config = parse(f"a.gguf --api-key-file {file} --api-key one", {"DFLASH_API_KEY": "env"}).config
    assert config.listener.api_keys == (b"one", b"file-1", b"file-2", b"env")
    assert "file-1" not in repr(config)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert "holds no key" in refusal_of(f"a.gguf --api-key-file {file}")


def test_a_bad_key_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"good\nhunter\x01two\n")
    message = refusal_of(f"a.gguf --api-key-file {file}")
    assert "the key in line 2 has control characters" in message
    assert "two" not in message


# Files


@pytest.mark.parametrize("line", ["--api-key-file {}", "--chat-template-file {}", "--config {}",
                                  "--model-card {}", "--tls-cert {} --tls-key {}"])  # fmt: skip
def test_what_is_no_readable_file_is_refused(line: str, tmp_path: Path) -> None:
    model = "" if "--config" in line else "a.gguf "
    os.mkfifo(tmp_path / "fifo")
    flag = line.split()[0]
    for path, problem in [
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is a directory"),
        (tmp_path / "fifo", "is no regular file"),
        (Path("/dev/zero"), "is no regular file"),
    ]:
        message = refusal_of(model + line.format(path, path))
        assert message.startswith(f"{flag} {path} {problem}"), message


def test_a_file_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("dflash_trio.cli.input_files.os.open", refuse)
    message = refusal_of(f"a.gguf --chat-template-file {tmp_path / 'x'}")
    assert "may not be read (model block 1 (a))" in message


def test_an_enormous_file_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**24 + 1)
    assert "is larger than" in refusal_of(f"--config {tmp_path / 'huge'}")


# The configuration


def test_what_is_not_given_has_the_configuration_s_defaults() -> None:
    assert parse("a.gguf").config == ServerConfig(models=(ModelConfig("a.gguf", "a", 0),))


def test_everything_given_arrives(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("{{ messages }}")
    card = tmp_path / "card"
    card.write_text("")
    launch = parse(
        f"""--check --log-format json --log-level debug
        --host :: --port 0 --routing-queue-limit 0 --api-key k --no-cors --drain-timeout 0
        --client-stall-timeout 0.5 --max-body-bytes 10 --max-connections 3
        --tls-cert {file} --tls-key {file}
        --model /m/a.gguf --model-name n --alias x --alias y --target-device vulkan:3
        --max-ctx 100 --max-concurrency 256 --kv-pool-tokens 1000 --decode-headroom 1
        --cache-type-k q8_0 --cache-type-v bf16 --flash-attn on --fa-window 0 --chunk 64
        --threads 2 --gpu-layers 0 --no-mmap --mlock --rope-freq-base 1e6
        --rope-freq-scale 0.25 --chat-template-file {file} --default-max-tokens 50
        --temperature 0 --top-p 1 --top-k 0 --min-p 0 --repeat-penalty 1.1 --seed 7
        --prefix-cache-slots 3 --prefill-cache-slots 2 --disk-prefix-cache off
        --model-card {card} --hard-limit-reply-budget 0 --think-max-tokens 40
        --reasoning-effort-low 1 --reasoning-effort-medium 2 --reasoning-effort-high 3
        --reasoning-effort-x-high 4 --reasoning-effort-max 5
        --thinking on --tool-parser hermes --on-sigterm finalize
        --cpu-moe --ds4-fused-decode --ds4-expert-top-k 4 --ds4-prefill exact"""
    )
    assert launch.action == "check"
    assert launch.config == ServerConfig(
        models=(
            ModelConfig(
                path="/m/a.gguf",
                name="n",
                position=0,
                aliases=("x", "y"),
                target_device=DevicePlacement("vulkan", 3),
                max_ctx=100,
                max_concurrency=256,
                kv_pool_tokens=1000,
                decode_headroom=1,
                cache_type_k="q8_0",
                cache_type_v="bf16",
                flash_attn="on",
                chunk=64,
                threads=2,
                gpu_layers=0,
                cpu_moe=True,
                ds4_fused_decode=True,
                ds4_expert_top_k=4,
                ds4_prefill="exact",
                mmap=False,
                mlock=True,
                rope_freq_base=1e6,
                rope_freq_scale=0.25,
                chat_template_file=str(file),
                default_max_tokens=50,
                hard_limit_reply_budget=0,
                think_max_tokens=40,
                prefix_cache_slots=3,
                prefill_cache_slots=2,
                reasoning_efforts={"low": 1, "medium": 2, "high": 3, "x-high": 4, "max": 5},
                thinking="on",
                tool_parser="hermes",
                model_card_file=str(card),
                card=ModelCard(str(card)),
                sampling=SamplingDefaults(0.0, 1.0, 0, 0.0, 1.1, 7),
                on_sigterm="finalize",
            ),
        ),
        listener=ListenerConfig(
            host="::",
            port=0,
            routing_queue_limit=0,
            api_keys=(b"k",),
            drain_timeout=0.0,
            client_stall_timeout=0.5,
            max_body_bytes=10,
            max_connections=3,
            tls_cert=str(file),
            tls_key=str(file),
        ),
        log_format="json",
        log_level="debug",
    )


def test_seed_minus_one_is_a_random_one() -> None:
    assert parse("a.gguf --seed -1").config.models[0].sampling.seed is None
    assert parse(f"a.gguf --seed={2**63 - 1}").config.models[0].sampling.seed == 2**63 - 1


@pytest.mark.parametrize("primary", ["hip:0", "hip:1"])
def test_two_models_on_two_gpus_launch_in_the_primary_s_order(primary: str) -> None:
    config = parse(QWEN_AND_DS4.format(primary=primary, **PARTS)).config
    order = ["qwen", "ds4"] if primary == "hip:0" else ["ds4", "qwen"]
    assert [model.name for model in config.models] == order
    qwen = next(model for model in config.models if model.name == "qwen")
    assert (qwen.max_ctx, qwen.max_concurrency, qwen.kv_pool_tokens) == (4096, 4, 16384)
    assert qwen.draft_file == "/models/qwen38-dflash2.gguf"
    assert str(qwen.draft_device) == "hip:0"
    ds4 = next(model for model in config.models if model.name == "ds4")
    assert (ds4.ds4_fused_decode, ds4.ds4_expert_top_k, ds4.ds4_prefill) == (True, 6, "exact")
    budgets = [(each.default_max_tokens, each.hard_limit_reply_budget) for each in config.models]
    assert budgets == [(2048, 1024)] * 2
    assert (config.listener.port, config.listener.routing_queue_limit) == (8080, 32)


def test_list_devices_needs_no_model() -> None:
    launch = parse("--list-devices")
    assert (launch.action, launch.config.models) == ("list-devices", ())
    assert parse("a.gguf --list-devices").action == "list-devices"
    assert "exclude each other" in refusal_of("--check --list-devices a.gguf")


# Values in bad form


@pytest.mark.parametrize(
    ("flag", "texts"),
    [
        ("--flash-attn", ["", "ON", "yes"]),
        ("--cache-type-k", ["q8", "F16"]),
        ("--on-sigterm", ["kill"]),
        ("--thinking", ["", "true", "high"]),
        ("--tool-parser", ["", "Hermes", "xml"]),
        ("--ds4-prefill", ["fast"]),
        ("--log-level", ["trace"]),
        ("--model", ["", "a\0b", "\ud800"]),
        ("--chat-template-file", [""]),
        ("--disk-prefix-cache", [""]),
        ("--draft-device", ["rpc:", "x:0", "rpc:a\nb"]),
        ("--target-devices", ["hip:0", "hip:0,", "hip:0,auto", ","]),
        ("--target-layer-split", ["1", "1,0", "1,x", "1,nan"]),
        ("--kvflash", ["off", "1.5"]),
        ("--cors-origin", ["example.org", "https://", "ftp://x", "https://a/b", "null"]),
        (
            "--cors-origin",
            ["http://user@x", "http://x?y", "http://x#y", r"http://a\b", "http://a b"],
        ),
        (
            "--cors-origin",
            ["http://a:", "http://a:0", "http://a:080", "http://a:65536", "http://:1"],
        ),
        ("--cors-origin", ["http://[x]", "http://[::1%lo]", "http://[::1", "http://::1", "**"]),
        ("--cors-origin", ["http://127.1", "http://0x7f000001", "http://1.2.3.4."]),
        ("--api-key", ["\ud800"]),
    ],
)
def test_a_value_out_of_form_is_refused_with_the_form(flag: str, texts: list[str]) -> None:
    for text in texts:
        message = refusal_of([flag, text, "--model-name", "x"])
        assert message.startswith(f"{flag} ")
        assert ": write " in message


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://a-b.my_host.example:65535", "https://a-b.my_host.example:65535"),
        ("http://192.0.2.1:3000", "http://192.0.2.1:3000"),
        ("http://3com.example1", "http://3com.example1"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://[0:0::1]", "http://[::1]"),
    ],
)
def test_origins_are_kept_as_browsers_write_them(text: str, origin: str) -> None:
    config = parse(shlex.join(["a.gguf", "--cors-origin", text])).config
    assert config.listener.cors_origins == (origin,)


@pytest.mark.parametrize("text", ["https://*.example.com", "http://*", "http://localhost:*"])
def test_an_origin_with_a_wildcard_is_refused_naming_the_only_one(text: str) -> None:
    message = refusal_of(["a.gguf", "--cors-origin", text])
    assert message.startswith(f"--cors-origin {text} has a * within")
    assert "the only wildcard is * alone" in message


def test_a_path_too_long_to_open_is_refused() -> None:
    message = refusal_of(["a.gguf", "--chat-template-file", "x" * 5000])
    assert "cannot be opened, File name too long (model block 1 (a))" in message
