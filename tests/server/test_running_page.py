"""The page on running the server: its commands are run, or the page says that they were not."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
import yaml

from dflash_trio.cli import parse_command_line
from dflash_trio.config import ServerConfig
from dflash_trio.engine.client import WORKER_STOP_BOUND
from dflash_trio.routing.drain import CUT_GRACE
from dflash_trio.server import EXIT_MARGIN
from tests.engine.written_models import write_model
from tests.support.http_client import PATIENCE

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "docs" / "examples"

RUN = {"Before a start", "Unix socket", "TLS", "Completion"}


def blocks(language: str) -> dict[str, list[str]]:
    """The page's blocks of a language by their section."""
    found: dict[str, list[str]] = {}
    for section in PAGE.split("\n## ")[1:]:
        title = section.split("\n", 1)[0]
        for block in re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL):
            found.setdefault(title, []).append(block)
    return found


SH = blocks("sh")


def test_what_the_page_says_is_run_here_is() -> None:
    """What is not run has its reason on the page: tests/docs/test_commands.py. Its readers are told
    too."""
    for section in PAGE.split("\n## ")[1:]:
        title = section.split("\n", 1)[0]
        ours = "<!-- run by: tests/server/test_running_page.py -->" in section
        assert ours == (title in RUN), title
        if "<!-- not run: " in section:
            assert re.search(r"Tried by hand|Not run", section), title


class Machine:
    """The page's machine in a folder: its paths lead there, and its ``dflash-server`` is ours."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        for name in ("etc", "run", "bin", "models"):
            (folder / name).mkdir()
        program = folder / "bin" / "dflash-server"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dflash_trio "$@"\n')
        program.chmod(0o755)
        # The page's paths have no blanks, which a shell would want quoted; those here may.
        linked = folder / "models" / "small.gguf"
        linked.symlink_to(model)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._places = {
            "/models/small.gguf": str(linked),
            "/etc/dflash": str(folder / "etc"),
            "/run/dflash": str(folder / "run"),
            "8443": str(self.port),
        }
        self._env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def here(self, text: str) -> str:
        for place, ours in self._places.items():
            text = text.replace(place, ours)
        return text

    def run(self, block: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-e", "-c", self.here(block)],
            env=self._env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, block: str) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", f"exec {self.here(block)}"]
        return subprocess.Popen(command, env=self._env, cwd=ROOT, stderr=subprocess.DEVNULL)


@pytest.fixture
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    real = request.node.get_closest_marker("real")
    model = request.getfixturevalue("smollm2") if real else write_model(tmp_path / "small.gguf")
    # A Unix socket's path is short.
    return Machine(tmp_path, str(model))


@pytest.fixture
def curl() -> None:
    for tool in ("curl", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here")


def test_the_check_prints_what_the_page_says(machine: Machine, tmp_path: Path) -> None:
    (example,) = blocks("toml")["systemd"]
    (tmp_path / "etc" / "dflash.toml").write_text(machine.here(example))
    plain, as_json = SH["Before a start"][0].splitlines()
    result = machine.run(plain)
    assert (result.returncode, result.stderr) == (0, "")
    section = PAGE.split("\n## Before a start\n")[1].split("\n## ")[0]
    shown = re.search(r"\n```\n(The launch is fine.*?)```", section, re.DOTALL)
    assert shown is not None
    # The same rows with the same labels; the numbers are the model's and the machine's.
    assert labels(result.stdout) == labels(shown[1])
    document = json.loads(machine.run(as_json).stdout)
    fields = re.findall(
        r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    )
    assert set(fields) == set(document) | set(document["models"][0])
    for field in (*document["listener"], *document["models"][0]["memory"][0]):
        assert field == "device" or f"`{field}`" in section


def labels(text: str) -> list[str]:
    return [line[:12].rstrip() for line in text.splitlines() if not line.startswith("  warning")]


async def until_served(machine: Machine, block: str, process: subprocess.Popen[bytes]) -> str:
    """What the page's clients get once the server is loaded."""
    with trio.fail_after(PATIENCE):
        while True:
            assert process.poll() is None, "the server has ended"
            result = await trio.to_thread.run_sync(machine.run, block)
            if result.returncode == 0 and "model_loading" not in result.stdout:
                return result.stdout
            await trio.sleep(0.1)


async def served(machine: Machine, server: str, clients: str) -> str:
    process = machine.start(server)
    try:
        answer = await until_served(machine, clients, process)
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE):
            code = await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        assert code == 0
    finally:
        process.kill()
        process.wait()
    return answer


@pytest.mark.real
@pytest.mark.usefixtures("curl")
async def test_a_unix_socket_serves_as_the_page_says(machine: Machine, tmp_path: Path) -> None:
    answer = await served(machine, *SH["Unix socket"])
    assert '"object":"list"' in answer.replace(" ", "")
    assert "chat.completion" in answer
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.real
@pytest.mark.usefixtures("curl")
async def test_tls_serves_as_the_page_says(machine: Machine) -> None:
    certificate, server, clients = SH["TLS"]
    result = machine.run(certificate)
    assert result.returncode == 0, result.stderr
    answer = json.loads(await served(machine, server, clients))
    assert answer["object"] == "list"


def test_completion_is_there_as_the_page_says(machine: Machine) -> None:
    bash = shutil.which("bash")
    assert bash
    command = [bash, "-c", f"{SH['Completion'][0]}\ncomplete -p dflash-server"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "complete -F _dflash_server dflash-server\n"


# ---------------------------------------------------------------------- systemd


def unit() -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in (EXAMPLES / "dflash-server.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            values.setdefault(name, []).append(value)
    return values


def test_the_unit_leaves_the_server_time_to_drain(tmp_path: Path) -> None:
    (command,) = unit()["ExecStart"]
    (example,) = blocks("toml")["systemd"]
    file = tmp_path / "dflash.toml"
    file.write_text(example)
    config = launch(command.replace("/etc/dflash/dflash.toml", str(file)).split()[1:])
    assert config.listener.drain_timeout is not None
    assert int(unit()["TimeoutStopSec"][0]) > config.listener.drain_timeout + 17
    assert [model.sigterm_policy for model in config.models] == ["drain"]
    assert (unit()["Type"], unit()["KillSignal"]) == (["notify"], ["SIGTERM"])
    assert unit()["RestartPreventExitStatus"] == ["2"]
    assert int(unit()["LimitNOFILE"][0]) > config.listener.max_connections


def test_the_unit_ends_no_loading_that_is_slow_and_silent() -> None:
    assert unit()["TimeoutStartSec"] == ["infinity"]


def test_the_pages_unix_socket_has_a_folder_that_the_unit_makes() -> None:
    """``ProtectSystem=strict`` leaves nothing else of /run to write to."""
    server, clients = SH["Unix socket"]
    (path,) = set(re.findall(r"/run/\S+\.sock", server + clients))
    assert unit()["ProtectSystem"] == ["strict"]
    assert [f"/run/{name}" for name in unit()["RuntimeDirectory"]] == [os.path.dirname(path)]
    assert "AF_UNIX" in unit()["RestrictAddressFamilies"][0].split()


def test_the_unit_verifies(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("systemd-analyze is not here")
    text = (EXAMPLES / "dflash-server.service").read_text()
    copy = tmp_path / "dflash-server.service"
    # It looks whether the program is there.
    program = tmp_path / "dflash-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy.write_text(text.replace("/opt/dflash/bin/dflash-server", str(program)))
    result = subprocess.run(
        [verifier, "verify", copy], capture_output=True, text=True, timeout=60, check=False
    )
    if "ailed to" in result.stderr and "dflash-server.service" not in result.stderr:
        pytest.skip(f"systemd-analyze does not work here: {result.stderr.strip()}")
    assert (result.returncode, result.stderr) == (0, "")


# ------------------------------------------------------------------- containers


def launch(words: list[str]) -> ServerConfig:
    return parse_command_line(words, {}).config


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instruction(name: str) -> list[str]:
    """The words of the last instruction of that name, which is in exec form."""
    line = re.findall(rf"^\s*{name} (\[.*\])$", dockerfile(), re.MULTILINE)[-1]
    words: list[str] = json.loads(line)
    return words


def test_the_images_options_are_a_launch() -> None:
    program, *words = instruction("ENTRYPOINT")
    assert program == "dflash-server"
    config = launch([*words, "--model", "/models/small.gguf"])
    assert (config.listener.host, config.listener.port) == ("0.0.0.0", 8080)
    assert instruction("CMD") == ["--help"]
    assert re.search(r"^STOPSIGNAL SIGTERM$", dockerfile(), re.MULTILINE)
    assert re.findall(r"^USER (.*)$", dockerfile(), re.MULTILINE) == ["10001"]
    assert "/health" in re.findall(r"^HEALTHCHECK .*$", dockerfile(), re.MULTILINE)[0]


@pytest.mark.parametrize(
    "command", re.findall(r"docker run (.*?[^\\])\n", "".join(SH["Docker"]), re.DOTALL)
)
def test_the_pages_containers_have_options_that_exist(command: str, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    words = command.replace("\\\n", " ").replace(" /tls/", f" {tmp_path}/").split()
    image = next(i for i, word in enumerate(words) if re.fullmatch(r"dflash-server(:\w+)?", word))
    config = launch([*instruction("ENTRYPOINT")[1:], *words[image + 1 :]])
    stop = re.search(r"--stop-timeout (\d+)", command)
    if config.listener.drain_timeout is not None:
        assert stop is not None
        assert int(stop[1]) > config.listener.drain_timeout + 17


def test_the_image_is_built_from_all_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = project["tool"]["hatch"]
    wanted = {
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
        *hatch["build"]["targets"]["wheel"]["packages"],
        Path(hatch["version"]["path"]).parts[0],
    }
    copied: set[str] = set()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile(), re.MULTILINE):
        copied |= set(sources.split())
    assert copied == wanted
    package = {file for file in packaged() if file.parts[0] in wanted}
    assert any(file.suffix == ".gguf" for file in package)
    for file in (*map(Path, wanted), *package):
        assert reaches_docker(file), f"{file} is not sent to Docker"
    for file in ("tests/conftest.py", ".git/HEAD", "models/a.gguf", "dflash_trio/a.gguf"):
        assert not reaches_docker(Path(file)), f"{file} is sent to Docker"


def test_a_change_of_the_code_does_not_compile_anew_what_it_needs() -> None:
    """A layer above the code's has all that the package would install."""
    before, code, _ = dockerfile().partition("COPY dflash_trio")
    assert code
    assert re.findall(r"^COPY (.*) \S+$", before, re.MULTILINE)[0] == "pyproject.toml"
    (program,) = re.findall(r"python3 -c '(.*?)' > needed.txt", before)
    assert "-r needed.txt" in before
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    assert (result.returncode, result.stdout.splitlines()) == (0, wanted)


def packaged() -> set[Path]:
    """The files of the package's folder, without what Python leaves there."""
    files = (path for path in (ROOT / "dflash_trio").rglob("*") if path.is_file())
    return {path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts}


def reaches_docker(file: Path) -> bool:
    """By .dockerignore: the last line that matches a file, or a folder above it, decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = re.escape(line.removeprefix("!"))
        pattern = pattern.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, path.as_posix()) for path in (file, *file.parents)):
            sent = line[0] == "!"
    return sent


def test_the_wheel_has_every_file_of_the_package() -> None:
    """.gitignore decides over that too, and it leaves out weights."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    files = wheel.WheelBuilder(str(ROOT)).recurse_included_files()
    assert packaged() <= {Path(file.relative_path) for file in files}


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_pages_health_check_for_tls_tells_well_from_ill(
    status: int, healthy: bool, tmp_path: Path
) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("elsewhere.example").configure_cert(context)
    (block,) = (block for block in SH["Docker"] if "--tls-cert" in block)
    words = shlex.split(block)
    command = words[words.index("--health-cmd") + 1]
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        here = command.replace("8080", str(server.server_port))
        here = here.replace("python3", shlex.quote(sys.executable), 1)
        result = subprocess.run(["sh", "-c", here], capture_output=True, timeout=60, check=False)
        thread.join(PATIENCE)
    assert (result.returncode == 0) == healthy, result.stderr
    assert healthy or b"HTTP Error 503" in result.stderr


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_compose_gives_the_server_a_launch_and_time_to_drain() -> None:
    services: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    server, front = services["dflash"], services["open-webui"]
    config = launch([*instruction("ENTRYPOINT")[1:], *server["command"]])
    assert config.listener.drain_timeout is not None
    assert [model.sigterm_policy for model in config.models] == ["drain"]
    assert seconds(server["stop_grace_period"]) > config.listener.drain_timeout + 17
    assert (EXAMPLES / server["build"]["context"]).resolve() == ROOT
    url = front["environment"]["OPENAI_API_BASE_URL"]
    assert url == f"http://dflash:{config.listener.port}/v1"
    key = front["environment"]["OPENAI_API_KEY"]
    assert key == server["environment"]["DFLASH_API_KEY"]
    assert "ports" not in server


def manifests() -> dict[str, dict[str, Any]]:
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_a_pod_is_a_launch_and_has_time_to_drain() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = launch([*instruction("ENTRYPOINT")[1:], *container["args"]])
    assert config.listener.drain_timeout is not None
    assert [model.sigterm_policy for model in config.models] == ["drain"]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = before + config.listener.drain_timeout + CUT_GRACE + WORKER_STOP_BOUND + EXIT_MARGIN
    assert pod["terminationGracePeriodSeconds"] > needed
    (port,) = container["ports"]
    assert port["containerPort"] == config.listener.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert f"USER {pod['securityContext']['runAsUser']}" in dockerfile()
    # What it mounts holds the model that it loads.
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert config.models[0].path.startswith(f"{mount['mountPath']}/")


def test_the_service_leads_to_the_pods() -> None:
    service, deployment = manifests()["Service"], manifests()["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["selector"]["matchLabels"]
    (port,) = service["spec"]["ports"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert port["targetPort"] in [given["name"] for given in container["ports"]]


def test_the_page_on_draining_adds_up_what_the_server_adds_up() -> None:
    page = (ROOT / "docs" / "drain.md").read_text(encoding="utf-8")
    parts = [int(number) for number in re.findall(r"^\| \+ (\d+) \|", page, re.MULTILINE)]
    assert parts == [CUT_GRACE, WORKER_STOP_BOUND, EXIT_MARGIN]
    assert f"`--drain-timeout` + {sum(parts)}" in page
