"""Files that cannot be served are told apart before anything is loaded, each by its own line."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_trio.engine.model_file import ModelFileError, check_model_file


def write_gguf(
    path: Path, architecture: str = "llama", *, splits: int = 0, number: int = 0, rows: int = 64
) -> Path:
    """A small file in the format, with one tensor in it."""
    writer = gguf.GGUFWriter(path, architecture)
    if splits:
        writer.add_uint16("split.count", splits)
        writer.add_uint16("split.no", number)
    writer.add_tensor("token_embd.weight", np.ones((rows, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path | str) -> str:
    with pytest.raises(ModelFileError) as caught:
        check_model_file(str(path))
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line, "the file is named"
    return line


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "good.gguf")


def test_a_whole_model_passes_with_its_facts(good: Path) -> None:
    model = check_model_file(str(good))
    assert model.architecture == "llama"
    assert model.parts == (str(good),)
    assert model.size_bytes == good.stat().st_size


def test_a_name_that_is_no_text_is_only_a_name(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "name-") + b"\xff.gguf"
    write_gguf(Path(os.fsdecode(path)))
    assert check_model_file(os.fsdecode(path)).architecture == "llama"


@pytest.mark.parametrize("missing", [1, 31, 4000])
def test_a_file_cut_short_in_its_tensors_is_refused_with_both_sizes(
    good: Path, missing: int
) -> None:
    whole = good.stat().st_size
    os.truncate(good, whole - missing)
    line = refused(good)
    assert f"cut short: {whole - missing} bytes of " in line
    assert "fetch it again" in line


def test_half_a_file_is_refused(good: Path) -> None:
    os.truncate(good, good.stat().st_size // 2)
    assert "cut short" in refused(good)


def test_a_file_of_nothing_but_its_header_is_refused(good: Path) -> None:
    os.truncate(good, good.stat().st_size - 64 * 32 * 4)
    assert "cut short" in refused(good)


@pytest.mark.parametrize("length", [4, 5, 8, 20, 40, 100])
def test_a_file_cut_short_in_its_header_is_refused_in_one_voice(
    good: Path, length: int, capfd: pytest.CaptureFixture[str]
) -> None:
    os.truncate(good, length)
    assert "cut short or damaged in its header" in refused(good)
    assert capfd.readouterr().err == "", "llama.cpp's own lines say nothing to an operator"


def test_an_empty_file_is_refused_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    assert "is empty" in refused(path)


@pytest.mark.parametrize("content", [b"G", b"GGU", b"Once upon a time", b"GGML" + b"\0" * 64])
def test_a_renamed_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "story.gguf"
    path.write_bytes(content)
    assert "not a GGUF file" in refused(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in refused(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere.gguf")


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "link.gguf"
    path.symlink_to(tmp_path / "nowhere.gguf")
    assert "does not exist" in refused(path)


def test_a_link_to_a_model_is_that_model(good: Path) -> None:
    path = good.with_name("link.gguf")
    path.symlink_to(good)
    assert check_model_file(str(path)).size_bytes == good.stat().st_size


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    code = (
        "import sys\nfrom dflash_trio.engine.model_file import *\n"
        "try:\n check_model_file(sys.argv[1])\nexcept ModelFileError as e:\n print(e)\n"
    )
    # In a process of its own, so that one that waits can be ended.
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "not a regular file" in done.stdout


def test_a_device_is_refused() -> None:
    assert "not a regular file" in refused("/dev/null")


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        check_model_file("model\0.gguf")


def test_a_path_through_a_file_is_refused(good: Path) -> None:
    assert "cannot be read" in refused(good / "model.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(good: Path) -> None:
    good.chmod(0)
    assert "cannot be read (Permission denied)" in refused(good)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_file_whose_reading_fails_is_refused() -> None:
    # A regular file that everybody may open and whose first bytes nobody can read.
    assert "cannot be read" in refused("/proc/self/mem")


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("clip", "a vision projector (mmproj)"),
        ("dflash", "a DFlash draft"),
        ("dflash2", "a DFlash draft"),
        ("eagle3", "an EAGLE draft"),
        ("imatrix", "an importance matrix"),
    ],
)
def test_a_gguf_that_is_no_model_is_refused_by_what_it_is(
    tmp_path: Path, architecture: str, what: str
) -> None:
    line = refused(write_gguf(tmp_path / "other.gguf", architecture))
    assert f"is {what}, not a model" in line


def test_a_gguf_without_an_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    # Magic, version 3, no tensors, no metadata.
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    assert "names no general.architecture" in refused(path)


# ------------------------------------------------------------------------------ split models


def write_split(folder: Path, count: int = 3) -> list[Path]:
    return [
        write_gguf(
            folder / f"model-{number + 1:05}-of-{count:05}.gguf", splits=count, number=number
        )
        for number in range(count)
    ]


def test_a_split_model_is_named_by_its_first_part_and_counts_all_of_them(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    model = check_model_file(str(parts[0]))
    assert model.parts == tuple(map(str, parts))
    assert model.size_bytes == sum(part.stat().st_size for part in parts)


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    assert "is part 2 of a split model: give part 1" in refused(write_split(tmp_path)[1])


@pytest.mark.parametrize("name", ["model.gguf", "model-1-of-3.gguf", "model-00001-of-00004.gguf"])
def test_a_part_with_another_name_is_refused(tmp_path: Path, name: str) -> None:
    path = write_split(tmp_path)[0].rename(tmp_path / name)
    assert "NAME-00001-of-00003.gguf" in refused(path)


def damage_nothing_but_remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "line"), [(damage_nothing_but_remove, "does not exist"), (cut, "cut short")]
)
def test_a_later_part_that_is_not_whole_is_refused_by_its_name(
    tmp_path: Path, damage: Callable[[Path], None], line: str
) -> None:
    parts = write_split(tmp_path)
    damage(parts[2])
    with pytest.raises(ModelFileError, match=line) as caught:
        check_model_file(str(parts[0]))
    assert str(parts[2]) in str(caught.value)


# ---------------------------------------------------------------------------- damaged headers


def test_no_damage_to_a_header_ends_the_process(tmp_path: Path) -> None:
    """Bytes overwritten at random: refused or, where nothing can be told, accepted."""
    whole = write_gguf(tmp_path / "whole.gguf", rows=2).read_bytes()
    header = len(whole) - 2 * 32 * 4
    dice = random.Random(7)
    for number in range(250):
        damaged = bytearray(whole)
        for _ in range(dice.choice((1, 1, 2, 8))):
            damaged[dice.randrange(4, header)] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
        (tmp_path / f"{number}.gguf").write_bytes(damaged)
    code = (
        "import sys, pathlib\nfrom dflash_trio.engine.model_file import *\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('[0-9]*.gguf')):\n"
        " print(path.name, flush=True)\n"
        " try:\n  check_model_file(str(path))\n except ModelFileError:\n  pass\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.split()
    assert (done.returncode, lines[-1]) == (0, "done"), f"{lines[-1]}: {done.stderr[-400:]}"


@pytest.mark.real
def test_the_real_models_pass(smollm2: Path, gemma: Path) -> None:
    assert check_model_file(str(smollm2)).architecture == "llama"
    assert check_model_file(str(gemma)).architecture == "gemma3"


@pytest.mark.real
@pytest.mark.parametrize("part", [0.5, 0.999])
def test_a_real_model_cut_short_is_refused(smollm2: Path, tmp_path: Path, part: float) -> None:
    content = smollm2.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * part)])
    assert "cut short" in refused(path)
