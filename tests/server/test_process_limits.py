"""Launches under the limits of an ordinary user's process, whoever runs the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from dflash_trio.net import server_ssl_context
from tests.engine.written_models import write_model

# Root has the right to lock everything until it is out of the set that execve(2) grants from;
# others never had it.
LIMITED = """
import ctypes, os, resource, sys
name, limit = sys.argv[1], int(sys.argv[2])
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
resource.setrlimit(getattr(resource, name), (limit, limit))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
KIB = 1024


LOAD = """
import sys, threading
from dflash_trio.config import DevicePlacement
from dflash_trio.engine.llama_runner import LlamaRunner, LlamaSpec
from dflash_trio.engine.model_runner import ModelLoadError
spec = LlamaSpec(
    path=sys.argv[1], devices=(DevicePlacement("cpu", 0),), slots=1, max_ctx=256, pool=None,
    chunk=64, threads=1, mlock=sys.argv[2] == "lock", mmap=sys.argv[3] == "mmap",
)
try:
    LlamaRunner(spec, on_progress=lambda _: None, stopped=threading.Event()).close()
    print("loaded")
except ModelLoadError as error:
    print(error)
"""


def limited(name: str, limit: int, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return limited_python(name, limit, ["-m", "dflash_trio", *arguments])


def limited_python(
    name: str, limit: int, arguments: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, name, str(limit), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def lines_of_refusal(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    return result.stderr.splitlines()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model.gguf"))


# --- --mlock


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_weights_that_may_not_be_locked_refuse_the_launch(
    model: str, check: tuple[str, ...]
) -> None:
    result = limited(
        "RLIMIT_MEMLOCK", 64 * KIB, [model, "--target-device=cpu:0", "--mlock", "--port=0", *check]
    )
    (line,) = lines_of_refusal(result)
    assert "--mlock has 190 KiB of weights to lock" in line
    assert "64 KiB" in line
    assert "ulimit -l" in line
    assert "LimitMEMLOCK=" in line


def test_the_weights_of_all_blocks_count_together(tmp_path: Path) -> None:
    words = ["--load-balancing"]
    for name in "abc":
        path = write_model(tmp_path / f"{name}.gguf")
        words += ["--model", str(path), "--target-device=cpu:0"] + ["--mlock"] * (name != "b")
    assert limited("RLIMIT_MEMLOCK", 380 * KIB, [*words, "--check"]).returncode == 0
    (line,) = lines_of_refusal(limited("RLIMIT_MEMLOCK", 379 * KIB, [*words, "--check"]))
    assert "model block 3 (c)" in line
    assert "beside 190 KiB of other models" in line


@pytest.mark.real
@pytest.mark.parametrize("mmap", ["mmap", "copy"])
def test_a_lock_that_fails_while_loading_fails_the_load(smollm2: Path, mmap: str) -> None:
    """What is known before may be wrong: so it is looked at again by whoever loads."""
    load = ["-c", LOAD, str(smollm2)]
    result = limited_python("RLIMIT_MEMLOCK", 64 * KIB, [*load, "lock", mmap])
    assert "its weights cannot be locked (failed to mlock" in result.stdout
    assert "ulimit -l" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert limited_python("RLIMIT_MEMLOCK", 64 * KIB, [*load, "no", mmap]).stdout == "loaded\n"


# --- --max-connections


def test_a_hard_limit_of_open_files_below_the_connections_is_a_warning(model: str) -> None:
    result = limited("RLIMIT_NOFILE", 300, [model, "--target-device=cpu:0", "--check"])
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "--max-connections 1024 wants 1280 open files" in said
    assert "the hard limit is 300" in said
    assert "lower --max-connections to 44" in said
    few = limited(
        "RLIMIT_NOFILE", 300, [model, "--target-device=cpu:0", "--max-connections=44", "--check"]
    )
    assert "open files" not in few.stdout


# --- --tls-key


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_an_encrypted_key_is_refused_by_name_and_nobody_is_asked(
    model: str, tmp_path: Path, check: tuple[str, ...]
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    leaf = trustme.CA().issue_cert("localhost")
    leaf.cert_chain_pems[0].write_to_path(certificate)
    plain = load_pem_private_key(leaf.private_key_pem.bytes(), None)
    encryption = BestAvailableEncryption(b"secret")
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    assert server_ssl_context(str(certificate), str(key), password="secret")
    arguments = [model, "--target-device=cpu:0", "--port=0", *check]
    arguments += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    (line,) = lines_of_refusal(limited("RLIMIT_NOFILE", 300, arguments))
    assert f"--tls-key {key} is encrypted: decrypt it first (openssl pkey -in {key} -out" in line
