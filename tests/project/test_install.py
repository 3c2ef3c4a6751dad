"""The two sizes of an installation: what the small one does, and what it says of the rest."""

import subprocess
import sys
import tomllib
from pathlib import Path

import bundles
import pytest
from cache_shards import entries, made
from packaging.requirements import Requirement
from safetensors.numpy import save_file

from enginecast.installation import EXTRAS, install_command
from enginecast.runtime.sessions.tensorrt.library import RTX

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CODE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
{rest}
"""
MAIN = "from enginecast.cli.app import main; main()"


def names(extra: str = "") -> set[str]:
    """The libraries of an extra, or of the small installation, as they are imported."""
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = {Requirement(text).name for text in wanted} - {"enginecast"}
    return {name.replace("-", "_").replace("rtx_cu13", "rtx") for name in found}


def run(*words: object, rest: str = MAIN, missing: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Run a command where no library of an extra can be imported."""
    looked_for = {"torch_tensorrt", RTX.module}  # by doctor, which imports neither here
    refused = missing or tuple(EXTRAS.keys() - looked_for)
    code = CODE.format(missing=refused, rest=rest)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundles.make_bundle(tmp_path / "bundle")


def test_the_table_of_extras_is_that_of_the_project() -> None:
    for extra in {*EXTRAS.values()}:
        assert names(extra) >= {library for library, one in EXTRAS.items() if one == extra}
    assert names("export") == {library for library, one in EXTRAS.items() if one == "export"}
    assert not names() & EXTRAS.keys()


def test_the_small_installation_runs_engines(bundle: Path, tmp_path: Path) -> None:
    feeds, output = tmp_path / "feeds.safetensors", tmp_path / "out.safetensors"
    save_file(bundles.feeds(), feeds)
    for words in (
        ("run", bundle, "--inputs", feeds, "-o", output),
        ("inspect", bundle),
        ("bench", bundle, "--inputs", feeds, "--rounds", "3"),
        ("trust", bundle),
        ("doctor",),
        ("doctor", tmp_path),
    ):
        code, _, err = run(*words)
        assert code == 0, (words, err)
    assert output.exists()


def test_the_small_installation_reads_caches(tmp_path: Path) -> None:
    made(tmp_path / "cache").commit(entries(range(5)))
    for command in ("info", "prune"):
        code, out, err = run("cache", command, tmp_path / "cache")
        assert code == 0, (command, out, err)


@pytest.mark.parametrize(
    "words",
    [
        ("export", "json:make", "-o", "out"),
        ("opt", "json:make", "--pipeline", "fuse-rms-norm"),
        ("passes",),
        ("diffusers", "export", "pipeline", "-o", "out"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_needs_an_extra_says_how_to_install_it(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    there = (tmp_path / word if word == "pipeline" else word for word in words)
    code, out, err = run(*there)
    assert (code, out) == (3, ""), err
    assert {install_command("export"), install_command("diffusers")} & {*err.splitlines()}, err
    assert f"error: enginecast {words[0]} needs " in err


@pytest.mark.slow
def test_parts_of_commands_that_need_an_extra(bundle: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n")
    parquet = tmp_path / "texts.parquet"
    parquet.write_bytes(b"PAR1")
    texts = tmp_path / "texts.txt"
    texts.write_text("a text\n")
    made(tmp_path / "cache").commit(entries(range(2)))
    new = ("-o", tmp_path / "new")
    for extra, words in (
        ("export", ("bench", bundle, "--against", "eager", "--model", "json:make")),
        ("export", ("verify", bundle, "--model", "json:make")),
        ("signing", ("sign", bundle, "--key", key)),
        ("ray", ("cache", "fill", bundle, "--prompts", texts, "--runner", "ray", *new)),
        ("cache", ("cache", "fill", bundle, "--prompts", parquet, *new)),
        ("cache", ("cache", "export", tmp_path / "cache", "-o", tmp_path / "out.parquet")),
    ):
        code, out, err = run(*words)
        assert (code, out) == (3, ""), (words, err)
        assert install_command(extra) in err, (words, err)


@pytest.mark.parametrize("name", ["compile", "record", "attach", "verify(sys.argv[1], model='m')"])
def test_python_names_say_it(name: str, bundle: Path) -> None:
    rest = (
        "import enginecast\n"
        "from enginecast.errors import MissingError\n"
        "try:\n"
        f"    enginecast.{name}\n"
        "except MissingError as error:\n"
        "    print(error)\n"
    )
    code, out, err = run(bundle, rest=rest)
    assert code == 0, err
    assert install_command("export") in out


def test_the_project_says_which_versions_it_is_for() -> None:
    minors = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: 3." in text]
    assert minors[0] == PROJECT["requires-python"].removeprefix(">=")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["export"]):
        if requirement.name in ("torch", "transformers"):
            least = str(requirement.specifier).removeprefix(">=")
            assert f"| {requirement.name} | {least} and newer |" in readme
