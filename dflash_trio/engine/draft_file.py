"""Checks on a draft's file, against its target's, before anything is loaded."""

from __future__ import annotations

from attrs import frozen

from .llama_abi import GgufSummary, read_gguf_header
from .llama_file_tokens import FileTokens, read_file_tokens
from .model_file import ModelFile, ModelFileError, check_model_file, check_whole_file
from .model_shape import ModelShape, model_shape

DFLASH = "dflash"
DRAFT_MODEL = "draft-model"
DEFAULT_BLOCK_SIZE = 16
"""llama.cpp's own, of drafts whose header names none."""
DEFAULT_LONGEST = 16
"""Tokens that a whole model guesses in one go, unless said otherwise."""

CANNOT_REWIND = frozenset(
    (
        *("arwkv7", "bailingmoe3", "deepseek4", "falcon-h1", "glm5-next", "granitehybrid", "jamba"),
        *("kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "minimax-01"),
        *("nemotron_h", "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next"),
        *("qwen4exp", "rwkv6", "rwkv6qwen2", "rwkv7"),
    )
)
"""Architectures with a state that goes forward only: the ones that llama.cpp calls recurrent or
hybrid (``llm_arch_is_recurrent``, ``llm_arch_is_hybrid``), as of the pinned version. Asked again of
the loaded model."""
SHOWS_LAYERS = frozenset(
    (
        *("gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "llama", "mimo2", "minimax-m2"),
        *("muse-glimmer", "nanbeige", "qwen3", "qwen3moe"),
    )
)
"""Of the others, those whose layers' inputs llama.cpp lets a draft read. It cannot be asked, and a
model that lacks them ends the process: these are the ones whose graphs set ``t_layer_inp`` in its
``src/models``, as of the pinned version."""
_SHOWS_ITS_END = frozenset(("mimo2",))
"""Of those, the ones that show the last layer's output as well."""

_OTHER_DRAFTS = {
    "eagle3": "an EAGLE draft",
    "gemma4-assistant": "a Gemma 4 assistant",
}
_UNUSED = 5
_TYPE_NAMES = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "a byte"}


@frozen
class DraftFile:
    """A draft that goes with its target."""

    path: str
    kind: str
    """``dflash``, ``dflash2``, ``dspark`` or ``draft-model``."""
    shape: ModelShape
    size_bytes: int
    longest: int
    """Tokens that it guesses in one go."""
    block: int = 0
    """Tokens that it decodes for that; 0 of a whole model, which decodes one after the other."""
    feature_bytes: int = 0
    """What it reads of its target's layers, for each token."""
    borrows: bool = False
    """It has no embeddings of its own, and reads the target's."""

    @property
    def is_block_draft(self) -> bool:
        return self.kind != DRAFT_MODEL

    @property
    def spare(self) -> int:
        """Cells that a sequence needs in its cache beside those for its tokens."""
        return self.block or self.longest


def check_takes_back(target: ModelFile, draft: str) -> None:
    """Wrong guesses have to be taken back, whatever makes them. Raises :class:`ModelFileError`."""
    if target.architecture in CANNOT_REWIND:
        raise ModelFileError(
            f"{target.path} ({target.architecture}) keeps a recurrent state and cannot take tokens "
            f"back, as drafts want it: leave --draft {draft} out"
        )


def check_draft_file(path: str, longest: int | None, target: ModelFile) -> DraftFile:
    """Check that ``path`` is a draft for ``target``. ``longest``: tokens to guess in one go, as the
    operator wants it; ``None``: what the draft does by itself.

    Reads headers only. Raises :class:`ModelFileError`, with one line.
    """
    check_takes_back(target, path)
    summary = check_whole_file(path)
    if summary.architecture in _OTHER_DRAFTS:
        raise ModelFileError(
            f"{path} is {_OTHER_DRAFTS[summary.architecture]}, which is not supported: give a "
            "DFlash draft or a whole model as --draft"
        )
    if summary.architecture == DFLASH:
        draft = _block_draft(path, summary, longest, target)
    else:
        draft = _whole_model(path, longest)
    different = _different_tokens(draft, target)
    if different is not None:
        raise ModelFileError(
            f"the draft {path} has not the vocabulary of {target.path}: {different}; give a draft "
            "made for this model"
        )
    return draft


def _whole_model(path: str, longest: int | None) -> DraftFile:
    file = check_model_file(path)
    if file.architecture in CANNOT_REWIND:
        raise ModelFileError(
            f"the draft {path} ({file.architecture}) keeps a recurrent state and cannot take "
            "tokens back: give another draft"
        )
    return DraftFile(path, DRAFT_MODEL, file.shape, file.size_bytes, longest or DEFAULT_LONGEST)


def _block_draft(
    path: str, summary: GgufSummary, longest: int | None, target: ModelFile
) -> DraftFile:
    facts, tensors = summary.facts, {name for name, _ in summary.tensors}
    if target.architecture not in SHOWS_LAYERS:
        raise ModelFileError(
            f"{path} reads its target's layers, and llama.cpp does not show those of "
            f"{target.architecture} ({target.path}): give a whole model as --draft, or leave it out"
        )
    if facts.get("hyper_connection.count"):
        raise ModelFileError(
            f"{path} is a draft made of DeepSeek V4's layers, which is not supported: give another "
            "one, or leave --draft out"
        )
    theirs = read_gguf_header(target.path)
    wide = facts.get("embedding_length")
    target_wide = theirs.facts.get("embedding_length") if theirs is not None else None
    if wide != target_wide or not isinstance(wide, int):
        raise ModelFileError(
            f"the draft {path} is for embeddings of {wide} values, and those of {target.path} have "
            f"{target_wide}: give a draft made for this model"
        )
    layers = facts.get("target_layers")
    if not isinstance(layers, tuple) or not layers or not all(type(n) is int for n in layers):
        raise ModelFileError(f"the draft {path} names no target_layers: convert it anew")
    count = len(target.shape.layers)
    last = count if target.architecture in _SHOWS_ITS_END else count - 1
    wrong = [layer for layer in layers if not 0 <= layer <= last]
    if wrong:
        raise ModelFileError(
            f"the draft {path} reads layer {wrong[0]} of its target, and {target.path} has "
            f"{count} layers, from 0: give a draft made for this model"
        )
    kind = DFLASH
    if "selector_hidden.weight" in tensors:
        kind = "dflash2"
    elif "markov_w1.weight" in tensors:
        kind = "dspark"
    # Most DSparks guess a token at the last one's own place, too.
    anchored = kind == "dspark" and facts.get("sample_from_anchor", True) is True
    size = facts.get("block_size", DEFAULT_BLOCK_SIZE)
    if type(size) is not int:
        raise ModelFileError(f"the draft {path} has no number as its block_size: convert it anew")
    most = size if anchored else size - 1
    if most < 1:
        raise ModelFileError(f"the draft {path} has blocks of {size} tokens: nothing to guess")
    if longest is not None and longest > most:
        raise ModelFileError(
            f"--draft-max {longest} is more than the {most} tokens that {path} guesses at a time: "
            "lower it or leave it out"
        )
    chosen = longest or most
    return DraftFile(
        path,
        kind,
        model_shape(DFLASH, facts, summary.tensors),
        summary.needed_bytes,
        longest=chosen,
        block=chosen if anchored else chosen + 1,
        feature_bytes=4 * len(layers) * wide,
        borrows="token_embd.weight" not in tensors,
    )


# ------------------------------------------------------------------------- vocabularies


def _different_tokens(draft: DraftFile, target: ModelFile) -> str | None:
    """In what the two vocabularies differ; ``None`` if a token means the same in both."""
    ours, theirs = read_file_tokens(draft.path), read_file_tokens(target.path)
    if ours is None or theirs is None or not ours.texts or not theirs.texts:
        return "one of the files lists no tokens"
    if not draft.is_block_draft:
        return different_tokens(ours, theirs)
    if ours.mask is None or ours.mask >= len(ours.texts):
        return "it names no mask token"
    if len(ours.texts) != len(theirs.texts):
        # It reads the target's own tensors, row by row.
        return f"it has {len(ours.texts)} tokens, the model {len(theirs.texts)}"
    return different_tokens(ours, theirs, ignored=ours.mask)


def different_tokens(
    ours: FileTokens, theirs: FileTokens, *, ignored: int | None = None
) -> str | None:
    """In what a draft's tokens differ from its target's; ``None``: in nothing that matters.

    Either may have more at its end, if they are unused: vocabularies are rounded up to sizes that
    a device likes. ``ignored``: a token that need not be the same.
    """
    if ours.kind != theirs.kind:
        return f"its tokens are of the kind {ours.kind}, the model's of {theirs.kind}"
    shared = min(len(ours.texts), len(theirs.texts))
    if ours.texts[:shared] != theirs.texts[:shared]:
        for token, (our, their) in enumerate(zip(ours.texts, theirs.texts, strict=False)):
            if our != their and token != ignored:
                return f"token {token} is {_shown(our)} in it and {_shown(their)} in the model"
    if ours.types and theirs.types and ours.types[:shared] != theirs.types[:shared]:
        for token, (kind, other) in enumerate(zip(ours.types, theirs.types, strict=False)):
            if kind != other and token != ignored:
                return (
                    f"token {token}, {_shown(ours.texts[token])}, is {_type_name(kind)} in it and "
                    f"{_type_name(other)} in the model"
                )
    longer = ours if len(ours.texts) > shared else theirs
    if not all(kind == _UNUSED for kind in longer.types[shared:]) or (
        len(longer.texts) > shared and not longer.types
    ):
        return f"it has {len(ours.texts)} tokens, the model {len(theirs.texts)}"
    return None


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "backslashreplace"))


def _type_name(kind: int) -> str:
    return _TYPE_NAMES.get(kind, f"of kind {kind}")
