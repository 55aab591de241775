"""scripts/train-draft: what can be promised without torch; a smoke test of the rest with it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest

if TYPE_CHECKING:
    from train_draft_lib.source import Source

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


def started(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / "lib" / "train_draft.py", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_help_needs_no_torch() -> None:
    done = started("--help")
    assert done.returncode == 0
    assert "usage: scripts/train-draft" in done.stdout


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = started("--target", tmp_path / "no.gguf", "--out", tmp_path, "--work", tmp_path)
    assert done.returncode == 2
    assert f"there is no {tmp_path / 'no.gguf'}" in done.stderr


def test_a_python_without_torch_is_told_what_to_do(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("this Python has torch")
    target = tmp_path / "some.gguf"
    target.write_bytes(b"GGUF")
    done = started("--target", target, "--out", tmp_path, "--work", tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "has no torch" in line
    assert "pip install torch" in line


def test_training_prompts_are_all_different_and_repeatable() -> None:
    from train_draft_lib.prompts import training_prompts

    drawn = training_prompts(5000, seed=3)
    assert len({prompt for _, prompt in drawn}) == 5000
    assert drawn == training_prompts(5000, seed=3)
    assert all(prompt.isascii() and "{" not in prompt for _, prompt in drawn)


def test_held_out_prompts_share_no_topic_and_no_wording_with_training() -> None:
    from train_draft_lib import prompts, words

    held_out = prompts.held_out_prompts()
    assert [kind for kind, _, _ in held_out] == ["story"] * 10 + ["code"] * 10 + ["question"] * 10
    lists = [value for name, value in vars(words).items() if name.isupper()]
    known = {word.lower() for words_ in lists for word in words_}
    wordings = [
        prompts.FIELD.sub("(.+)", prompts.re.escape(t).replace(r"\{", "{").replace(r"\}", "}"))
        for templates in prompts.TEMPLATES.values()
        for t in templates
    ]
    for _, topic, prompt in held_out:
        assert topic in prompt
        assert not [word for word in known if topic.lower() in word]
        assert not [w for w in wordings if prompts.re.fullmatch(w, prompt)]


def test_curves_become_a_readable_svg() -> None:
    from train_draft_lib import plot

    curves = [
        {"seconds": 5.0, "step": 10, "loss": 7.5},
        {"seconds": 60.0, "step": 99, "loss": 3.25, "committed": 2.5, "accepted": [0.75, 0.5]},
    ]
    drawn = ElementTree.fromstring(plot.svg(curves, "a <draft>"))
    texts = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <draft>" in texts
    assert "loss, nats 3.25" in texts
    assert "2 0.50" in texts
    assert ElementTree.fromstring(plot.svg([], "nothing")) is not None


def shape() -> dict[str, Any]:
    return {
        "target_layers": (1, 3),
        "width": 64,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 32,
        "feed_forward": 96,
        "block": 8,
        "mask_token": 6,
        "rope_base": 1e5,
        "epsilon": 1e-5,
    }


def state(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = {
        "fc": (64, 128),
        "wq": (2, 64, 64),
        "wk": (2, 32, 64),
        "wv": (2, 32, 64),
        "wo": (2, 64, 64),
        "gate": (2, 96, 64),
        "up": (2, 96, 64),
        "down": (2, 64, 96),
        "enc_norm": (64,),
        "out_norm": (64,),
        "attn_norm": (2, 64),
        "ffn_norm": (2, 64),
        "q_norm": (2, 32),
        "k_norm": (2, 32),
    }
    return {name: rng.standard_normal(size, np.float32) for name, size in sizes.items()}


@pytest.mark.real
def test_an_export_has_what_llama_cpp_reads_and_the_targets_vocabulary(
    tmp_path: Path, smollm2: Path
) -> None:
    import gguf
    from train_draft_lib import export
    from train_draft_lib.source import Source

    source = Source(smollm2)
    rng = np.random.default_rng(1)
    values, scale = state(rng), rng.uniform(0.5, 2, 128).astype(np.float32)
    path = tmp_path / "draft.gguf"
    assert export.write(path, source, values, scale, shape(), 4096) == path.stat().st_size
    read = gguf.GGUFReader(path)
    assert read.get_field("general.architecture").contents() == "dflash"  # type: ignore[union-attr]
    found = {key: field.contents() for key, field in read.fields.items()}
    assert found["dflash.target_layers"] == [1, 3]
    assert found["dflash.block_size"] == 8
    assert found["tokenizer.ggml.mask_token_id"] == 6
    assert found["tokenizer.ggml.tokens"] == source.vocabulary().tokens
    assert "tokenizer.chat_template" not in found
    tensors = {t.name: t for t in read.tensors}
    assert len(tensors) == 3 + 2 * 11
    fc = tensors["fc.weight"]
    assert fc.tensor_type == gguf.GGMLQuantizationType.Q8_0
    back = gguf.dequantize(fc.data, fc.tensor_type)
    np.testing.assert_allclose(back / scale, export.rounded(values, scale)["fc"], rtol=1e-6)
    np.testing.assert_allclose(back, values["fc"] * scale, atol=0.06)


@pytest.fixture
def tiny(tmp_path: Path) -> Source:
    """A target without weights and with few tokens: its vocabulary is copied in no time."""
    import gguf
    from train_draft_lib.source import Source

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_context_length(4096)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(9)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Source(path)


@pytest.fixture
def exported(tmp_path: Path, tiny: Source) -> Path:
    """A draft of random weights with :func:`shape`, for features of a scale of its own."""
    from train_draft_lib import export

    rng = np.random.default_rng(1)
    values, scale = state(rng), rng.uniform(0.1, 4, 128).astype(np.float32)
    path = tmp_path / "before.gguf"
    export.write(path, tiny, values, scale, shape(), 4096)
    return path


def sizes() -> dict[str, tuple[int, ...]]:
    return {name: values.shape for name, values in state(np.random.default_rng(1)).items()}


def test_a_draft_that_is_begun_with_and_exported_untrained_is_the_same_file(
    tmp_path: Path, tiny: Source, exported: Path
) -> None:
    from train_draft_lib import export, start

    scale = np.random.default_rng(2).uniform(0.1, 4, 128).astype(np.float32)  # of other texts
    values = export.unfolded(start.weights(exported, shape(), sizes()), scale)
    before = state(np.random.default_rng(1))
    for name in ("wq", "down"):
        np.testing.assert_allclose(values[name], before[name], atol=0.03)
    np.testing.assert_array_equal(values["k_norm"], before["k_norm"])
    again = tmp_path / "again.gguf"
    export.write(again, tiny, values, scale, shape(), 4096)
    assert again.read_bytes() == exported.read_bytes()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"block": 16}, "it has block 8, and this run 16: add --block 8, or leave"),
        (
            {"layers": 3, "target_layers": (1, 2)},
            "it has target-layers 1,3 and layers 2, and this run 1,2 and 3: "
            "add --target-layers 1,3 --layers 2, or leave",
        ),
        ({"mask_token": 7}, "add --mask-token 6, or"),
        ({"feed_forward": 32}, "add --feed-forward 96, or"),
        ({"rope_base": 1e6}, "add --rope-base 100000, or"),
        ({"width": 576, "block": 4}, "it has width 64 and block 8, and this run 576 and 4: it was"),
    ],
)
def test_a_draft_of_another_shape_is_not_begun_with(
    exported: Path, wanted: dict[str, Any], said: str
) -> None:
    from train_draft_lib import start

    with pytest.raises(start.UnfitStart) as refused:
        start.weights(exported, {**shape(), **wanted}, sizes())
    assert said in str(refused.value)


def test_what_is_no_whole_draft_is_not_begun_with(
    tmp_path: Path, tiny: Source, exported: Path
) -> None:
    from train_draft_lib import start

    whole, cut = exported.read_bytes(), tmp_path / "cut.gguf"
    for length in (0, 100, len(whole) // 2, len(whole) - 4000):
        cut.write_bytes(whole[:length])
        with pytest.raises(start.UnfitStart, match="no whole draft"):
            start.weights(cut, shape(), sizes())
    with pytest.raises(start.UnfitStart, match="no whole draft"):
        start.weights(tiny.path, shape(), sizes())
    with pytest.raises(start.UnfitStart, match="other sizes than it says"):
        start.weights(exported, shape(), {**sizes(), "wv": (2, 64, 64)})
    with pytest.raises(start.UnfitStart, match="No such file or directory: name another file"):
        start.weights(tmp_path / "no.gguf", shape(), sizes())


@pytest.mark.real
def test_prompts_are_tokenized_as_llama_cpp_does(smollm2: Path) -> None:
    from train_draft_lib.prompts import held_out_prompts, training_prompts
    from train_draft_lib.source import Source
    from train_draft_lib.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(Source(smollm2).vocabulary(), smollm2)
    prompts = [p for _, p in training_prompts(300, seed=2)] + [p for _, _, p in held_out_prompts()]
    by_llama = tokenizer._by_llama([tokenizer.render(prompt) for prompt in prompts])
    assert tokenizer.encode(prompts) == by_llama


@pytest.mark.real
def test_a_few_steps_on_the_cpu_end_in_a_draft_and_go_on_where_they_ended(
    tmp_path: Path, smollm2: Path
) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("this Python has no torch: the training itself is not tried")
    small = "--device cpu --prompts 4 --own-prompts 4 --rows 4 --answer-tokens 48 "
    small += "--held-out-tokens 12 --held-out-prompts 1 --batch 1 --anchors 4 --layers 1 "
    small += "--feed-forward 32"
    places = ("--target", smollm2, "--out", tmp_path / "out", "--work", tmp_path / "work")
    for steps in ("2", "4"):
        done = started(*places, *small.split(), "--max-steps", steps)
        assert done.returncode == 0, done.stderr
    assert "goes on at step 2" in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"draft{end}" for end in (".gguf", "-curves.json", "-curves.svg", "-table.md")}

    # Begun with, and not trained: the same file. Of another shape: refused before all else.
    draft = tmp_path / "out" / "draft.gguf"
    again = ("--target", smollm2, "--out", tmp_path / "again", "--work", tmp_path / "again-work")
    done = started(*again, *small.split(), "--start-from", draft, "--max-steps", "0")
    assert done.returncode == 0, done.stderr
    assert f"begins with {draft}; unseen prompts: " in done.stdout
    assert (tmp_path / "again" / "draft.gguf").read_bytes() == draft.read_bytes()
    done = started(*again[:-1], tmp_path, *small.split(), "--start-from", draft, "--block", "4")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"--start-from {draft}: it has block 8, and this run 4: add --block 8" in line
    assert not done.stdout


def torch_of_this_python() -> Any:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("this Python has no torch: the training itself is not tried")
    import torch

    return torch


def test_features_in_eight_bits_keep_what_varies_of_a_large_dimension() -> None:
    torch = torch_of_this_python()
    from train_draft_lib.dataset import Packed

    values = torch.randn((4000, 32), generator=torch.Generator().manual_seed(1))
    values[:, 5] = 300 + values[:, 5]  # as some dimensions of a residual stream are
    values[0] *= 3000  # as a text's first token is
    packed = Packed(len(values), [values, values], torch.float32)
    every = torch.arange(len(values))
    for layer in (0, 1):
        packed.put(every, layer, values)
    got = packed[every]
    for layer in (0, 1):
        off = got[:, layer * 32 : (layer + 1) * 32] - values
        assert float(off[1:].std(0).max()) < 0.04
        assert float(off[0].norm() / values[0].norm()) < 0.04


@pytest.mark.real
def test_rows_are_refilled_and_every_prompt_is_answered_as_it_is_alone(
    smollm2: Path,
) -> None:
    torch = torch_of_this_python()
    from train_draft_lib.generate import Generator
    from train_draft_lib.source import Source
    from train_draft_lib.target import Target
    from train_draft_lib.tokenizer import ChatTokenizer

    source = Source(smollm2)
    vocabulary = source.vocabulary()
    target = Target(source, "cpu", torch.float32, 192)
    questions = ["What is 2 plus 3?", "Name three fruits.", "Hi!", "Write a rhyme.", "Why?"]
    prompts = ChatTokenizer(vocabulary, smollm2).encode(questions)
    alone = {}
    for index, prompt in enumerate(prompts):
        (answer,) = Generator(target, 1, 128, vocabulary.ends, 1).answers([prompt], 40)
        alone[index] = answer.tokens
    many = Generator(target, 2, 128, vocabulary.ends, 1).answers(prompts, 40)
    assert {answer.prompt: answer.tokens for answer in many} == alone


@pytest.mark.real
def test_what_stands_around_a_question_is_what_the_template_writes(smollm2: Path) -> None:
    from train_draft_lib.source import Source
    from train_draft_lib.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(Source(smollm2).vocabulary(), smollm2)
    before, after = tokenizer.around()
    (question,) = tokenizer.encode(["Who was first?"])
    assert question[: len(before)] == before
    assert question[-len(after) :] == after
