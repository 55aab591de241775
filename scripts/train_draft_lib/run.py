"""One run from the target's file to the draft's: data, training, judgement, export."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import export, plot, start
from .dataset import Seen, Texts, feature_scale, look
from .draft import Shape, matrix_shapes, new_parameters, norm_shapes
from .evaluate import Score, judge, table
from .generate import Generator, loop_ends
from .prompts import KINDS, held_out_prompts, training_prompts
from .source import Source, UnfitTarget, Vocabulary
from .target import Target, narrow_type
from .tokenizer import ChatTokenizer
from .train import CHECKPOINT, Batches, Settings, Trainer


class Clock:
    """Says what happens, with the seconds since the run's start."""

    def __init__(self, begun: float) -> None:
        self.begun = begun

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", flush=True)


def run(arguments: argparse.Namespace, begun: float) -> int:
    clock = Clock(begun)
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(arguments.work.absolute() / "inductor"))
    torch.backends.cuda.matmul.allow_tf32 = True
    source = Source(arguments.target)
    vocabulary = source.vocabulary()
    shape = shape_of(arguments, source, vocabulary)
    begun_with = _begun_with(arguments, shape)
    size = _weigh(arguments, source, shape)
    clock.say(
        f"torch {torch.__version__} on {arguments.device}; a draft of {size:,} bytes: {shape}"
    )

    length = -(-(arguments.prompt_tokens + arguments.answer_tokens) // 8) * 8
    kind = narrow_type(arguments.target_type, arguments.device)
    target = Target(source, arguments.device, kind, length + 64)
    tokenizer = ChatTokenizer(vocabulary, arguments.target, arguments.llama_python)
    held_out, kinds, looped = _held_out(arguments, target, tokenizer, vocabulary, clock)
    texts = _texts(arguments, target, tokenizer, vocabulary, clock)

    cuda = arguments.device.startswith("cuda")
    narrow = torch.bfloat16 if cuda else torch.float32
    # Layer inputs of one token, and of its likeliest successors.
    width = len(shape.target_layers) * shape.width
    each = (width + 2 * len(shape.target_layers) if cuda else 4 * width) + arguments.candidates * 6
    fits = int(np.searchsorted(np.cumsum(texts.lengths) * each, arguments.feature_bytes))
    if fits < len(texts.lengths):
        clock.say(f"only {fits} of {len(texts.lengths)} answers fit into --feature-bytes")
        texts = texts.first(fits)
    rows = 256 if cuda else 4
    candidates = arguments.candidates if arguments.soft else 0
    seen = look(target, texts, shape.target_layers, candidates, rows, narrow, packed=cuda)
    seen_held_out = look(target, held_out, shape.target_layers, 0, rows, narrow)
    _wait(cuda)
    clock.say(f"layer inputs of {len(texts.tokens):,} tokens: {seen.features.nbytes / 1e9:.1f} GB")
    embedding, head = target.embedding, target.head
    del target

    settings = Settings(
        batch=arguments.batch,
        anchors=arguments.anchors,
        length=length,
        rate=arguments.rate,
        warm_up=arguments.warm_up,
        decay=arguments.decay,
        muon=arguments.optimizer == "muon",
        soft=arguments.soft,
        short_blocks=arguments.short_blocks,
        position_decay=arguments.position_decay,
        minutes=arguments.minutes,
        checkpoint_every=arguments.checkpoint_every,
        seed=arguments.seed,
    )
    scale = feature_scale(seen.features)
    batches = Batches(texts, seen, scale, shape, settings)
    trainer = Trainer(
        shape,
        settings,
        batches,
        embedding,
        head,
        arguments.work,
        compile_layers=arguments.compile and cuda,
        start=export.unfolded(begun_with, scale.cpu().numpy()) if begun_with else None,
    )
    if trainer.resumed:
        clock.say(f"goes on at step {trainer.steps}, {trainer.spent / 60:.1f} min of training")
    judged = _Judged(trainer, held_out, kinds, looped, seen_held_out)
    if begun_with:
        point, standing = judged.point()
        trainer.curves.append({"seconds": 0.0, "step": 0, **point})
        clock.say(f"begins with {arguments.start_from}; {standing}")
    _train(arguments, trainer, judged, clock)
    return _finish(arguments, trainer, judged, source, clock)


def shape_of(arguments: argparse.Namespace, source: Source, vocabulary: Vocabulary) -> Shape:
    sizes = source.sizes
    if arguments.target_layers:
        layers = tuple(int(part) for part in arguments.target_layers.split(","))
    else:
        last = sizes.layers - 1
        layers = tuple(sorted({max(1, round(1 + (last - 1) * i / 3)) for i in range(4)}))
    if not layers or min(layers) < 0 or max(layers) >= sizes.layers:
        raise UnfitTarget(f"it has the layers 0 to {sizes.layers - 1}, not all of {layers}")
    mask = arguments.mask_token if arguments.mask_token is not None else vocabulary.mask_token()
    return Shape(
        target_layers=layers,
        width=sizes.width,
        layers=arguments.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        feed_forward=arguments.feed_forward,
        block=arguments.block,
        mask_token=mask,
        rope_base=arguments.rope_base or sizes.rope_base,
        epsilon=sizes.epsilon,
    )


def _begun_with(arguments: argparse.Namespace, shape: Shape) -> dict[str, np.ndarray] | None:
    """The weights of ``--start-from``, where training has not begun yet."""
    if arguments.start_from is None or (arguments.work / CHECKPOINT).is_file():
        return None
    sizes = {**matrix_shapes(shape), **norm_shapes(shape)}
    return start.weights(arguments.start_from, shape.as_dict(), sizes)


def _weigh(arguments: argparse.Namespace, source: Source, shape: Shape) -> int:
    """The size of the file to come, found by writing one, before anything expensive is done."""
    state = {n: p.detach().numpy() for n, p in new_parameters(shape, "cpu", 0).items()}
    scale = np.ones(state["fc"].shape[1], np.float32)
    path = arguments.work / "untrained.gguf"
    size = export.write(path, source, state, scale, shape.as_dict(), source.sizes.context)
    path.unlink()
    if size > arguments.max_bytes:
        raise UnfitTarget(
            f"its draft would take {size:,} bytes, above --max-bytes {arguments.max_bytes:,}:"
            " lower --feed-forward or --layers"
        )
    return size


def _held_out(
    arguments: argparse.Namespace,
    target: Target,
    tokenizer: ChatTokenizer,
    vocabulary: Vocabulary,
    clock: Clock,
) -> tuple[Texts, list[str], list[int]]:
    """Texts, their kinds, and how much of each lies before the answer begins to loop."""
    every = held_out_prompts()
    most = arguments.held_out_prompts
    rows = [row for kind in KINDS for row in [r for r in every if r[0] == kind][:most]]
    asked = tokenizer.encode([prompt for _, _, prompt in rows])
    longest = max(map(len, asked)) + arguments.held_out_tokens
    room = arguments.prompt_tokens + arguments.answer_tokens
    if longest > room:
        raise UnfitTarget(f"--held-out-tokens leaves {longest - room} tokens too many")
    generator = Generator(target, len(asked), longest, vocabulary.ends, arguments.seed)
    generator.use_graphs &= arguments.graphs
    answers = {}
    for found in generator.answers(asked, arguments.held_out_tokens, cut_loops=False):
        answers[found.prompt] = found.tokens
    texts = Texts.of([(asked[i], answers[i], 0) for i in range(len(asked))])
    looped = []
    for index in range(len(asked)):
        row = torch.tensor([answers[index]])
        looped.append(len(asked[index]) + min(int(loop_ends(row)[0]), len(answers[index])))
    count = sum(len(a) for a in answers.values())
    clock.say(f"{len(asked)} held-out answers of {count} tokens")
    return texts, [kind for kind, _, _ in rows], looped


def _texts(
    arguments: argparse.Namespace,
    target: Target,
    tokenizer: ChatTokenizer,
    vocabulary: Vocabulary,
    clock: Clock,
) -> Texts:
    path = arguments.work / "texts.npz"
    if path.is_file():
        texts = Texts.load(path)
        clock.say(f"{len(texts.lengths)} answers from {path}")
        return texts
    length = arguments.prompt_tokens + arguments.answer_tokens
    generator = Generator(target, arguments.rows, length, vocabulary.ends, arguments.seed)
    generator.use_graphs &= arguments.graphs
    asked = _asked(arguments, tokenizer, generator, clock)
    begun = time.monotonic()

    def report(prompts: int, tokens: int) -> None:
        rate = tokens / (time.monotonic() - begun)
        clock.say(f"{prompts} answered, {tokens:,} tokens, {rate:,.0f} a second")

    answers = generator.answers(
        asked,
        arguments.answer_tokens,
        drawn_share=arguments.drawn_share,
        deadline=begun + arguments.generate_seconds,
        report=report,
    )
    rows = [(asked[a.prompt], a.tokens, a.drawn) for a in answers if len(a.tokens) >= 8]
    if not rows:
        raise UnfitTarget("it answers no prompt with eight tokens or more")
    # A cut data set should lose any prompts, not the longest.
    order = np.random.default_rng(arguments.seed).permutation(len(rows))
    texts = Texts.of([rows[i] for i in order])
    texts.save(path)
    del generator
    if target.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return texts


def _asked(
    arguments: argparse.Namespace, tokenizer: ChatTokenizer, generator: Generator, clock: Clock
) -> list[list[int]]:
    """Chats up to the answer: from templates and of the target's own making, in turn."""
    prompts = [prompt for _, prompt in training_prompts(arguments.prompts, arguments.seed)]
    written = [row for row in tokenizer.encode(prompts) if len(row) <= arguments.prompt_tokens]
    clock.say(f"{len(written)} prompts from templates")
    if not arguments.own_prompts:
        return written
    begin, end = tokenizer.around()
    room = arguments.prompt_tokens - len(begin) - len(end)
    if room < 8:
        raise UnfitTarget(f"its chat template leaves {room} of --prompt-tokens to a question")
    seen = {tuple(row) for row in tokenizer.encode([p for _, _, p in held_out_prompts()])}
    ends = set(generator.ends.tolist())
    made: list[list[int]] = []
    everything = (1 << 20, 1 << 20)
    same = [begin] * arguments.own_prompts
    for question in generator.answers(same, room, drawn_share=1.1, drawn_tokens=everything):
        tokens = question.tokens
        if tokens[-1] not in ends or len(tokens) < 4:
            continue  # nothing, or more than there is room for
        row = [*begin, *tokens[:-1], *end]
        if tuple(row) not in seen:
            seen.add(tuple(row))
            made.append(row)
    clock.say(f"{len(made)} prompts of the target's own, of {arguments.own_prompts} begun")
    both = itertools.zip_longest(written, made)
    return [row for pair in both for row in pair if row is not None]


class _Judged:
    """The held-out prompts, and the draft's standing on them."""

    def __init__(
        self,
        trainer: Trainer,
        texts: Texts,
        kinds: Sequence[str],
        looped: Sequence[int],
        seen: Seen,
    ) -> None:
        self.trainer, self.texts, self.kinds, self.looped, self.seen = (
            trainer,
            texts,
            kinds,
            looped,
            seen,
        )

    def __call__(
        self, block: int, parameters: dict[str, torch.Tensor] | None = None, *, loops: bool = True
    ) -> tuple[dict[str, Score], list[float]]:
        trainer = self.trainer
        ends = self.texts.lengths if loops else np.array(self.looped)
        return judge(
            parameters if parameters is not None else trainer.parameters,
            trainer.shape,
            self.texts,
            self.kinds,
            ends,
            self.seen.features,
            trainer.batches.scale,
            trainer.embedding,
            trainer.head,
            trainer.table,
            block,
        )

    def point(self) -> tuple[dict[str, Any], str]:
        """Of the curves, with whole blocks and the weights as they are; the same in words."""
        scores, accepted = self(self.trainer.shape.block)
        mean = scores["all"].mean
        shares = " ".join(f"{share:.2f}" for share in accepted)
        words = f"unseen prompts: {mean:.2f} a step, accepted {shares}"
        return {"committed": round(mean, 3), "accepted": accepted}, words


def _train(arguments: argparse.Namespace, trainer: Trainer, judged: _Judged, clock: Clock) -> None:
    settings = trainer.settings
    until = clock.begun + arguments.stop_after - arguments.reserve
    total = settings.minutes * 60
    if arguments.final:
        total = trainer.spent + max(1.0, until - time.monotonic())
    saved = looked = time.monotonic()
    steps, at = trainer.steps, time.monotonic()
    clock.say(f"trains to {total / 60:.1f} min, {len(trainer.batches)} texts")
    for loss in trainer.run(until, total, arguments.max_steps):
        now = time.monotonic()
        blocks = (trainer.steps - steps) * settings.batch * settings.anchors
        rate = blocks * (trainer.shape.block - 1) / max(1e-9, now - at)
        steps, at = trainer.steps, now
        point: dict[str, Any] = {
            "seconds": round(trainer.spent, 1),
            "step": trainer.steps,
            "loss": round(loss, 4),
        }
        line = (
            f"step {trainer.steps}, loss {loss:.3f}, {rate:,.0f} tokens guessed a second, "
            f"{(total - trainer.spent) / 60:.1f} min left"
        )
        if now - looked >= arguments.judge_every:
            standing, words = judged.point()
            point |= standing
            line += f"; {words}"
            looked = at = time.monotonic()
        trainer.curves.append(point)
        clock.say(line)
        if now - saved >= settings.checkpoint_every:
            trainer.save()
            saved = at = time.monotonic()
    trainer.save()


def _finish(
    arguments: argparse.Namespace, trainer: Trainer, judged: _Judged, source: Source, clock: Clock
) -> int:
    state = {n: p.detach().float().cpu().numpy() for n, p in trainer.parameters.items()}
    scale = trainer.batches.scale.float().cpu().numpy()
    path = arguments.out / f"{arguments.name}.gguf"
    shape = trainer.shape.as_dict()
    size = export.write(path, source, state, scale, shape, source.sizes.context)
    clock.say(f"{path}: {size:,} bytes")
    _write(arguments, trainer, {})
    served = export.rounded(state, scale)
    device = trainer.embedding.device
    parameters = {n: torch.from_numpy(v).to(device) for n, v in served.items()}
    found: dict[str, Any] = {}
    blocks = sorted(
        {block for block in (2, 4, trainer.shape.block) if block <= trainer.shape.block}
    )
    for block in blocks:
        for loops in (True, False):
            scores, accepted = judged(block, parameters, loops=loops)
            means = {kind: score.mean for kind, score in scores.items()}
            found[f"{block}{'' if loops else ' no loops'}"] = {
                "block": block,
                "loops": loops,
                "committed": means,
                "accepted": accepted,
            }
    text = table(list(found.values()))
    print(text, flush=True)
    (arguments.out / f"{arguments.name}-table.md").write_text(text + "\n", encoding="utf-8")
    block = trainer.shape.block
    trainer.curves.append(
        {
            "seconds": round(trainer.spent, 1),
            "step": trainer.steps,
            "committed": found[f"{block}"]["committed"]["all"],
            "accepted": found[f"{block}"]["accepted"],
        }
    )
    _write(arguments, trainer, found)
    clock.say("done")
    return 0


def _write(arguments: argparse.Namespace, trainer: Trainer, found: dict[str, Any]) -> None:
    document = {
        "shape": trainer.shape.as_dict(),
        "settings": vars(trainer.settings),
        "texts": len(trainer.batches),
        "tokens": len(trainer.batches.tokens),
        "steps": trainer.steps,
        "seconds": round(trainer.spent, 1),
        "curves": trainer.curves,
        "served": found,
    }
    out: Path = arguments.out
    (out / f"{arguments.name}-curves.json").write_text(json.dumps(document), encoding="utf-8")
    title = f"DFlash draft for {arguments.target.stem}"
    (out / f"{arguments.name}-curves.svg").write_text(plot.svg(trainer.curves, title), "utf-8")


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
