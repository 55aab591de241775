"""``python -m train_draft_lib.parity``: does llama.cpp propose what the torch model proposes?

Both get the same greedy texts and the same file; the torch side its weights as Q8_0 holds them.
Left over is what quantized activations do, so nearly all proposals are equal. A wrong order of
features, rotation, position, mask token or scope of attention would leave almost none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from . import export
from .draft import Shape, rope_table
from .evaluate import proposals
from .generate import Generator
from .prompts import held_out_prompts
from .source import Source
from .target import Target
from .tokenizer import ChatTokenizer


def read_draft(path: Path) -> tuple[Shape, dict[str, torch.Tensor]]:
    """A draft's file as the torch model. Its ``fc`` holds the scale: features come unscaled."""
    shape, state = export.read(path)
    return Shape(**shape), {name: torch.from_numpy(values) for name, values in state.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train_draft_lib.parity", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--llama-python", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--texts", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--tokens", type=int, default=60, help="of each answer (default 60)")
    parser.add_argument("--least", type=float, default=0.9, help="share of equal proposals")
    arguments = parser.parse_args(argv)

    source = Source(arguments.target)
    shape, state = read_draft(arguments.draft)
    vocabulary = source.vocabulary()
    tokenizer = ChatTokenizer(vocabulary, arguments.target, arguments.llama_python)
    every = held_out_prompts()
    chosen = [every[i + 10 * k][2] for k in range(3) for i in range(arguments.texts)]
    asked = tokenizer.encode(chosen)
    length = max(map(len, asked)) + arguments.tokens
    target = Target(source, "cpu", torch.float32, length + 64)
    generator = Generator(target, len(asked), length, vocabulary.ends, 1)
    answers = generator.answers(asked, arguments.tokens, cut_loops=False)
    texts = [np.array([*asked[a.prompt], *a.tokens], np.int32) for a in answers]
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "texts.npz"), Path(folder, "made.npz")
        np.savez(given, **{f"text{index:03}": text for index, text in enumerate(texts)})
        files = [str(path) for path in (arguments.target, arguments.draft, given, made)]
        subprocess.run(
            [arguments.llama_python, "-m", "train_draft_lib.served", *files],
            check=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        served = dict(np.load(made))
    table = rope_table(shape, length + 64, "cpu")
    equal: list[np.ndarray] = []
    errors: list[float] = []
    choices: list[np.ndarray] = []
    for index, text in enumerate(texts):
        name = f"text{index:03}"
        tokens = torch.from_numpy(text).long()
        hidden, inputs = target.prefill(tokens[None], shape.target_layers)
        features = torch.cat(inputs, -1)[0]
        theirs = torch.from_numpy(served[f"{name}.inputs"])
        errors.append(float((theirs[1:] - features[1:]).norm() / features[1:].norm()))
        choices.append(target.logits(hidden[0]).argmax(-1).numpy() == served[f"{name}.choices"])
        made_here = proposals(
            state, shape, theirs, tokens, target.embedding, target.head, table, first=1,
            block=shape.block,
        )  # fmt: skip
        anchors = served[f"{name}.anchors"]
        equal.append(made_here.numpy()[anchors - 1] == served[f"{name}.proposals"])
    shares = np.concatenate(equal).mean(0)
    print(f"layer inputs differ by {max(errors):.3f} of their size at most")
    print(f"the target's choices are equal in {np.concatenate(choices).mean():.3f} of the places")
    print("proposals equal by position: " + " ".join(f"{share:.3f}" for share in shares))
    return 0 if shares.mean() >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
