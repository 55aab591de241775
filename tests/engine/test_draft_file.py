"""A file that is no draft for its target is told by its header, each by its own line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from dflash_trio.engine.draft_file import DraftFile, check_draft_file, different_tokens
from dflash_trio.engine.llama_file_tokens import FileTokens, read_file_tokens
from dflash_trio.engine.model_file import ModelFileError, check_model_file
from tests.engine.written_models import write_model
from tests.support.written_drafts import MASK_TOKEN, tiny_tokenizer, write_dflash, write_target

TOKENIZER = tiny_tokenizer(300)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target.gguf", TOKENIZER)


def check(draft: Path, target: Path, longest: int | None = None) -> DraftFile:
    return check_draft_file(str(draft), longest, check_model_file(str(target)))


def refused(draft: Path, target: Path, longest: int | None = None) -> str:
    with pytest.raises(ModelFileError) as caught:
        check(draft, target, longest)
    line = str(caught.value)
    assert "\n" not in line
    assert str(draft) in line, "the draft is named"
    return line


def changed(key: str, **places: Any) -> Any:
    """The tokenizer with some values of a list replaced, by ``t`` and their number."""
    values = list(TOKENIZER.value(key))
    for name, value in places.items():
        values[int(name[1:])] = value
    return TOKENIZER.changed(**{key: values})


@pytest.mark.parametrize(
    ("options", "kind", "longest", "block"),
    [
        ({}, "dflash", 7, 8),
        ({"block_size": 5}, "dflash", 4, 5),
        ({"selector": 4}, "dflash2", 7, 8),
        ({"markov": True}, "dspark", 8, 8),
        ({"markov": True, "from_anchor": True}, "dspark", 8, 8),
        ({"markov": True, "from_anchor": False}, "dspark", 7, 8),
    ],
)
def test_the_kind_of_a_draft_is_told_by_its_file(
    tmp_path: Path, target: Path, options: dict[str, Any], kind: str, longest: int, block: int
) -> None:
    draft = check(write_dflash(tmp_path / "draft.gguf", TOKENIZER, **options), target)
    assert (draft.kind, draft.longest, draft.block) == (kind, longest, block)
    assert draft.is_block_draft
    assert draft.borrows
    assert draft.feature_bytes == 2 * 64 * 4


def test_fewer_tokens_at_a_time_make_shorter_blocks(tmp_path: Path, target: Path) -> None:
    path = write_dflash(tmp_path / "draft.gguf", TOKENIZER)
    draft = check(path, target, 3)
    assert (draft.longest, draft.block) == (3, 4)
    line = refused(path, target, 8)
    assert line.startswith("--draft-max 8 is more than the 7 tokens that ")


def test_any_model_with_the_same_tokens_is_a_draft(tmp_path: Path, target: Path) -> None:
    draft = check(target, target)
    assert (draft.kind, draft.longest, draft.is_block_draft) == ("draft-model", 16, False)
    assert check(target, target, 40).longest == 40


def test_what_is_no_model_is_refused_like_any_file(tmp_path: Path, target: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.gguf", target)
    assert "is a directory" in refused(tmp_path, target)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_dflash(tmp_path / "draft.gguf", TOKENIZER).read_bytes()[:-100])
    assert "cut short" in refused(cut, target)


@pytest.mark.parametrize("architecture", ["eagle3", "gemma4-assistant"])
def test_other_kinds_of_drafts_are_refused_by_name(
    tmp_path: Path, target: Path, architecture: str
) -> None:
    line = refused(write_model(tmp_path / "draft.gguf", architecture), target)
    assert "which is not supported: give a DFlash draft or a whole model" in line


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2", "phi3"])
def test_a_target_that_does_not_show_its_layers_takes_no_draft_that_reads_them(
    tmp_path: Path, architecture: str
) -> None:
    target = write_target(tmp_path / "t.gguf", TOKENIZER, architecture=architecture)
    line = refused(write_dflash(tmp_path / "draft.gguf", TOKENIZER), target)
    assert f"llama.cpp does not show those of {architecture} ({target})" in line
    assert line.endswith("give a whole model as --draft, or leave it out")
    assert check(target, target).kind == "draft-model"


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2", "mamba2", "deepseek4"])
def test_a_target_that_cannot_go_back_takes_no_draft(tmp_path: Path, architecture: str) -> None:
    target = write_target(tmp_path / "t.gguf", TOKENIZER, architecture=architecture)
    line = refused(write_dflash(tmp_path / "draft.gguf", TOKENIZER), target)
    assert f"({architecture}) keeps a recurrent state and cannot take tokens back" in line
    plain = write_target(tmp_path / "plain.gguf", TOKENIZER)
    assert "keeps a recurrent state and cannot take tokens back: give another" in refused(
        target, plain
    )


@pytest.mark.parametrize(("layers", "wrong"), [((1, 4), 4), ((7,), 7), ((-1, 2), -1)])
def test_layers_that_the_target_has_not_are_refused(
    tmp_path: Path, target: Path, layers: Sequence[int], wrong: int
) -> None:
    draft = write_dflash(tmp_path / "draft.gguf", TOKENIZER, target_layers=layers)
    line = refused(draft, target)
    assert f"reads layer {wrong} of its target, and {target} has 4 layers, from 0" in line


def test_embeddings_of_another_size_are_refused(tmp_path: Path, target: Path) -> None:
    line = refused(write_dflash(tmp_path / "draft.gguf", TOKENIZER, wide=96), target)
    assert f"is for embeddings of 96 values, and those of {target} have 64" in line


def test_a_block_of_one_token_has_nothing_to_guess(tmp_path: Path, target: Path) -> None:
    draft = write_dflash(tmp_path / "draft.gguf", TOKENIZER, block_size=1)
    assert "blocks of 1 tokens: nothing to guess" in refused(draft, target)


def test_a_block_size_that_is_no_whole_number_is_refused(tmp_path: Path, target: Path) -> None:
    writer = GGUFWriter(tmp_path / "draft.gguf", "dflash")
    writer.add_uint32("dflash.embedding_length", 64)
    writer.add_array("dflash.target_layers", [1, 2])
    writer.add_float32("dflash.block_size", 8.0)
    writer.add_tensor("fc.weight", np.zeros((64, 128), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "no number as its block_size" in refused(tmp_path / "draft.gguf", target)


def test_a_draft_of_deepseek_v4_s_layers_is_refused_by_name(tmp_path: Path, target: Path) -> None:
    facts: dict[str, int | float] = {"hyper_connection.count": 4}
    draft = write_dflash(tmp_path / "draft.gguf", TOKENIZER, markov=True, facts=facts)
    assert "DeepSeek V4's layers, which is not supported" in refused(draft, target)


# -------------------------------------------------------------------------- vocabularies


def test_another_vocabulary_is_refused_saying_where_it_differs(
    tmp_path: Path, target: Path
) -> None:
    other = changed("tokens", t77="elsewhere")
    for draft in (
        write_dflash(tmp_path / "draft.gguf", other),
        write_target(tmp_path / "model.gguf", other),
    ):
        line = refused(draft, target)
        assert f"has not the vocabulary of {target}: token 77 is 'elsewhere' in it and '" in line
        assert line.endswith("give a draft made for this model")


def test_the_mask_may_be_a_token_that_the_target_has_no_use_for(
    tmp_path: Path, target: Path
) -> None:
    masked = changed("tokens", **{f"t{MASK_TOKEN}": "<mask>"})
    check(write_dflash(tmp_path / "draft.gguf", masked), target)
    assert "'<mask>'" in refused(write_target(tmp_path / "model.gguf", masked), target)


def test_a_token_of_another_kind_is_refused(tmp_path: Path, target: Path) -> None:
    draft = write_target(tmp_path / "model.gguf", changed("token_type", t9=3))
    line = refused(draft, target)
    assert "token 9, ')', is control in it and normal in the model" in line


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path, target: Path) -> None:
    draft = write_target(tmp_path / "model.gguf", TOKENIZER.changed(model="llama"))
    assert "its tokens are of the kind llama, the model's of gpt2" in refused(draft, target)


def test_a_block_draft_has_exactly_as_many_tokens_as_its_target(
    tmp_path: Path, target: Path
) -> None:
    draft = write_dflash(tmp_path / "draft.gguf", tiny_tokenizer(301))
    assert "it has 301 tokens, the model 300" in refused(draft, target)


def tokens(*texts: str, types: Sequence[int] = ()) -> FileTokens:
    return FileTokens("gpt2", tuple(map(str.encode, texts)), tuple(types), None)


def test_unused_tokens_at_the_end_make_no_difference() -> None:
    short, unused = tokens("a", "b", types=(1, 1)), tokens("a", "b", "c", "d", types=(1, 1, 5, 5))
    used = tokens("a", "b", "c", "d", types=(1, 1, 5, 1))
    assert different_tokens(short, unused) is None
    assert different_tokens(unused, short) is None
    assert different_tokens(short, used) == "it has 2 tokens, the model 4"
    assert different_tokens(used, short) == "it has 4 tokens, the model 2"
    assert different_tokens(tokens("a"), tokens("a", "b")) == "it has 1 tokens, the model 2"


def test_what_a_file_lists_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "draft.gguf", changed("tokens", t40="é\0x\n"))
    found = read_file_tokens(str(path))
    assert found is not None
    assert (found.kind, len(found.texts), found.mask) == ("gpt2", 300, MASK_TOKEN)
    assert found.texts[0] == b"<|end|>"
    assert found.texts[299] == TOKENIZER.value("tokens")[299].encode()
    assert found.types == tuple(TOKENIZER.value("token_type"))
    path.write_bytes(b"GGUF")
    assert read_file_tokens(str(path)) is None
