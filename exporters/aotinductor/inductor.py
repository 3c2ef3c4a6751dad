"""Run Inductor ahead of time: settings, compiler, package.  All uses of torch._inductor are here.

The package is made to be the same from run to run and to say nothing of the machine that made it:
a fresh cache, numbers of threads left to the run, no source files, and no paths in the code.
"""

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from enginecast.errors import LoweringError, MissingError, first_line
from enginecast.exporters.files import copy_archive, quiet
from enginecast.library_names import private
from enginecast.passes.precision.cast_borders import rounds_as_source

_THREADS = 16
"""For which loops are split; how many there are is found out when the code runs."""
_SETTINGS: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.model_name_for_generated_files": "engine",
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.enable_frame_pointer": False,
    "cpp.dynamic_threads": True,
    "cpp.threads": _THREADS,
    # Otherwise each set of instructions is tried out by compiling a library for it.
    "cpp.vec_isa_ok": True,
}
_SETTINGS_OF: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"max_autotune": True, "coordinate_descent_tuning": True},
}
_LOGGERS = ("torch._inductor", "torch._dynamo", "torch.fx", "torch.export", "torch._functorch")
_OWN_LINE = re.compile(r"\berror: (?P<text>.+)")


def compile_package(
    program: ExportedProgram, path: Path, *, device: str, metadata: Mapping[str, str]
) -> None:
    """Compile a program and write it into a package, without weights and sources.

    Args:
        program: with flat inputs and outputs, on `device`.  Values of large weights are not looked
            at.

    Raises:
        MissingError: there is no C++ compiler, or no Triton for a GPU.
        LoweringError: Inductor, or the compiler, refuses the program.
    """
    fresh_cache = _inductor("utils.fresh_cache")
    compiler = find_compiler()
    if device == "cuda" and find_spec("triton") is None:
        raise MissingError(
            "--device cuda: Inductor writes GPU kernels in Triton, which is not installed",
            hint="pip install triton (it comes with torch for CUDA).",
        )
    with tempfile.TemporaryDirectory(prefix="enginecast-") as scratch:
        settings = {
            **_known({**_SETTINGS, **_SETTINGS_OF[device]}),
            "aot_inductor.precompile_headers": False,  # which pay when they are used again
            "aot_inductor.metadata": dict(metadata),
            # Without it, fp32 that is rounded to 16 bits and read as fp32 is not rounded.
            **_known({"emulate_precision_casts": rounds_as_source(program)}),
            "cpp.cxx": (None, str(_wrap(compiler, Path(scratch)))),
        }
        made = io.BytesIO()  # on a full disk its writer ends the process
        try:
            with _quiet(), fresh_cache(dir=scratch), _own_headers(scratch), torch.no_grad():
                _inductor("aoti_compile_and_package")(
                    program, package_path=made, inductor_configs=settings
                )
        except Exception as error:  # Inductor raises what its many parts raise
            raise LoweringError(
                f"Inductor cannot compile this program: {_first_line(error)}",
                hint="Use --target onnxruntime, or take the op out with a pass.",
            ) from error
        # Sources hold the command lines of the compiler, and with them paths of this machine.
        made.seek(0)
        copy_archive(made, path, without=(".cpp", ".h"))


def find_compiler() -> str:
    """The C++ compiler that Inductor takes.

    Raises:
        MissingError: there is none.
    """
    find, not_found = _inductor("cpp_builder.get_cpp_compiler"), _inductor("exc.InvalidCxxCompiler")
    try:
        return str(find())
    except not_found as error:
        raise MissingError(
            "--target aotinductor compiles C++, and there is no C++ compiler here",
            hint="Install one (apt install g++), or name it in the environment variable CXX.",
        ) from error


def vector_isa() -> str:
    """The vector instructions that Inductor compiles for here: "avx512 avx512_vnni"."""
    with _inductor("config").patch(_known({"cpp.vec_isa_ok": True})):
        return str(_inductor("cpu_vec_isa.pick_vec_isa")()).lower()


def _inductor(name: str) -> Any:
    return private(f"torch._inductor.{name}", "--target aotinductor")


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that another version of torch does not have."""
    config = _inductor("config")
    return {name: value for name, value in settings.items() if hasattr(config, name)}


def _wrap(compiler: str, folder: Path) -> Path:
    """A script that calls the compiler so that the code depends on the program alone.

    Inductor has no setting for more flags.  Paths that macros put into the code are cut, names are
    not drawn, and the code is for the instructions that the manifest names instead of for all that
    this machine has.
    """
    script = folder / Path(compiler).name  # Inductor tells compilers by their names
    torch_folder = Path(torch.__file__).parent
    flags = [
        f"-ffile-prefix-map={torch_folder}=torch",
        "-frandom-seed=engine",
    ]
    script.write_text(
        "#!/bin/sh\n"
        'for one in "$@"; do\n'
        "  shift\n"
        "  case $one in\n"
        "    -march=native) ;;\n"
        '    *.cpp) set -- "$@" "$one" "-ffile-prefix-map=${one%/*}=." ;;\n'
        '    *) set -- "$@" "$one" ;;\n'
        "  esac\n"
        "done\n"
        f'exec {shlex.join([compiler, *flags])} "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o700)
    return script


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inductor prints what it measures, and warns of what its users cannot change."""
    said = io.StringIO()
    with quiet(*_LOGGERS), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield


@contextlib.contextmanager
def _own_headers(folder: str) -> Iterator[None]:
    """Precompiled headers in a folder that goes: theirs is shared by all users of the machine."""
    codecache = _inductor("codecache")
    places = {"_HEADER_DIR": folder, "_HEADER_LOCK_DIR": folder}
    before = {name: getattr(codecache, name) for name in places}
    vars(codecache).update(places)
    try:
        yield
    finally:
        vars(codecache).update(before)


def _first_line(error: BaseException) -> str:
    """The compiler's own words where it spoke, else the first line that says something."""
    own = _OWN_LINE.search(str(error))
    return f"the C++ compiler says: {own['text'].strip()}" if own else first_line(error)[:300]
