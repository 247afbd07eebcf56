"""What the first cell of a notebook does as soon as it can import the helpers.

It installs the packages that are missing, and only those, and finds out whether this machine can
run the tutorial. Whatever is wrong is said in one sentence. torch is imported inside the functions
only, because torch may be what is wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

# What the notebooks import: the name of the package and its oldest version, as requirements.txt
# has it. Several packages bring pynvml, with versions of their own: any that imports will do.
NEEDED_PACKAGES = {
    "torch": ("torch", "2.6"),
    "torchvision": ("torchvision", "0.21"),
    "transformers": ("transformers", "4.48"),
    "tokenizers": ("tokenizers", "0.21"),
    "numpy": ("numpy", "1.26"),
    "PIL": ("pillow", "10.1"),
    "sklearn": ("scikit-learn", "1.5"),
    "matplotlib": ("matplotlib", "3.8"),
    "tqdm": ("tqdm", "4.66"),
    "filelock": ("filelock", "3.12"),
    "ipywidgets": ("ipywidgets", "8.1"),
    "pynvml": ("nvidia-ml-py3", None),
}
OLDEST_PYTHON = (3, 10)
SELECTOR = "https://pytorch.org/get-started/locally/"


class SetupProblem(Exception):
    """The notebook cannot run here; its text says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows in place of a traceback."""
        return [str(self)]


def prepare_kernel() -> None:
    """Install what is missing and check this machine; raises SetupProblem with one sentence."""
    if sys.version_info < OLDEST_PYTHON:
        found, needed = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
        raise SetupProblem(f"This kernel runs Python {found}, and {needed} or newer is needed.")
    install_missing()
    check_machine()


# --- Packages ------------------------------------------------------------------------------


def install_missing() -> None:
    """Install the packages that are not there, without touching any that is.

    torch and torchvision are never installed: which build fits is for their users to choose.
    """
    missing = [name for name in NEEDED_PACKAGES if not _importable(name)]
    own_choice = [name for name in missing if name in ("torch", "torchvision")]
    if own_choice:
        raise SetupProblem(
            f"Not installed: {' and '.join(own_choice)}; {SELECTOR} says how to get the build for "
            "this machine, after which the kernel has to be restarted."
        )
    if not missing:
        return
    packages = [NEEDED_PACKAGES[name] for name in missing]
    wanted = [package + (f">={oldest}" if oldest else "") for package, oldest in packages]
    print(f"Installing what is missing: {', '.join(package for package, _ in packages)}")
    problem = _pip_install(wanted)
    importlib.invalidate_caches()
    if problem is not None:
        raise SetupProblem(
            f"Could not install {', '.join(wanted)} ({problem}): without internet (on Kaggle it is "
            "switched on in the notebook's settings) these packages have to be there already."
        )


def _importable(name: str) -> bool:
    if name != "pynvml":
        return importlib.util.find_spec(name) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of its packages warns that it has a new name
        try:
            importlib.import_module(name)
        except ImportError:
            return False
    return True


def _pip_install(wanted: list[str]) -> str | None:
    """Run pip with all that is installed already held where it is; what went wrong, if anything."""
    held = [
        f"{package}=={version}"
        for package, _ in NEEDED_PACKAGES.values()
        if (version := _installed_version(package)) is not None
    ]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "installed.txt")
        constraints.write_text("\n".join(held), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries=1"]
        command += ["--disable-pip-version-check", f"--constraint={constraints}", *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return _last_line(errors[0] if errors else done.stderr)


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- The machine ---------------------------------------------------------------------------


def check_machine() -> None:
    """Hold versions, the pair of torch and torchvision, and the device against what is needed.

    Raises SetupProblem. The device gets one small operation to do: a GPU that torch knows may
    still be one that this build of torch has no code for.
    """
    _check_versions()
    torch = _import_pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns at length of what is said in a sentence here
        _check_device(torch)


def _check_versions() -> None:
    for name, (package, oldest) in NEEDED_PACKAGES.items():
        installed = _installed_version(package)
        if installed is None or oldest is None:
            continue
        loaded = getattr(sys.modules.get(name), "__version__", installed)
        if _public(loaded) != _public(installed):
            raise SetupProblem(
                f"{package} {loaded} is loaded in this kernel, and {installed} has been installed "
                "since: restart the kernel, then run all cells."
            )
        if _numbers(installed) < _numbers(oldest):
            raise SetupProblem(
                f"{package} {installed} is installed, and {oldest} or newer is needed: upgrade it "
                "and restart the kernel."
            )


def _public(version: Any) -> str:
    """A version without its local part: 2.14.1 for 2.14.1+cu130."""
    return str(version).partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", _public(version))[:2])


def _import_pair() -> Any:
    """Import torch and torchvision, which must be made for each other; torch."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        raise SetupProblem(
            f"torch cannot be imported ({_last_line(str(error))}): restart the kernel, and if that "
            f"does not help, install torch and torchvision as {SELECTOR} says."
        ) from None
    try:
        ops = importlib.import_module("torchvision").ops
        ops.nms(torch.zeros(1, 4), torch.ones(1), 0.5)
    except Exception as error:
        raise SetupProblem(
            f"torchvision {_installed_version('torchvision') or 'of unknown version'} was not made "
            f"for torch {torch.__version__} ({_last_line(str(error))}): restore the pair that the "
            "platform came with (a new session on Colab or Kaggle), or install both as "
            f"{SELECTOR} says, and restart the kernel."
        ) from None
    return torch


def _check_device(torch: Any) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and torch.version.cuda:
        kernels = torch.cuda.get_arch_list()
        if not any(_runs_on(built, torch.cuda.get_device_capability()) for built in kernels):
            raise SetupProblem(_no_kernels(torch))
    try:
        # No matrix product: cuBLAS would take a workspace, which the lessons' readings then hold.
        total = (torch.ones(4, device=device) * 2).sum().item()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "no kernel image" in reason:
            raise SetupProblem(_no_kernels(torch)) from None
        if "out of memory" in reason:
            cure = "other programs hold the GPU's memory (nvidia-smi lists them): end them"
        elif device.type == "cuda":
            cure = "an earlier error has cut this kernel off from the GPU: restart the kernel"
        else:
            cure = f"install torch again as {SELECTOR} says"
        raise SetupProblem(f"A first small operation failed ({reason}); {cure}.") from None
    if total != 8:
        raise SetupProblem(f"A sum on {device} came out wrong: 8 expected, got {total}.")


def _runs_on(built: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `sm_86`, or kept as `compute_90`, runs on a card of a capability."""
    kind, _, number = built.partition("_")
    digits = int(re.match(r"\d*", number)[0] or 0)
    major, minor = divmod(digits, 10)
    if kind == "compute":  # compiled when it is first needed, for this card and all newer ones
        return (major, minor) <= capability
    return kind == "sm" and major == capability[0] and minor <= capability[1]


def _no_kernels(torch: Any) -> str:
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (7, 5):  # Maxwell, Pascal, Volta: CUDA 13 has no compiler for them
        cure = "the builds of torch for CUDA 12.6 have it"
    else:
        cure = f"a newer build has it, see {SELECTOR}"
    return (
        f"The GPU {torch.cuda.get_device_name()} has compute capability {major}.{minor}, and this "
        f"build (torch {torch.__version__}, CUDA {torch.version.cuda}) has no code for it, only "
        f"{', '.join(torch.cuda.get_arch_list())}: choose another GPU (on Kaggle: T4 x2), or "
        f"another build; {cure}."
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no reason given"
