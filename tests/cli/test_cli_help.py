"""Help, options that every command has, and files of options."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from exports import cast

from enginecast.cli.app import app
from enginecast.cli.terminal.help import EXAMPLES
from enginecast.pipelines.record import RECORD
from enginecast.runtime.bundle.manifest import MANIFEST_NAME

Capture = pytest.CaptureFixture[str]
ORDER = (
    "inspect export verify report run bench tune opt bisect passes diffusers cache sign trust"
    " doctor"
)

GROUPS = {"cache": "fill info verify prune merge export compare", "diffusers": "export run"}


def commands() -> dict[str, Any]:
    """Every command by its path, such as "cache fill"."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_group(app).commands.items():
        inside = getattr(command, "commands", None)
        found |= (
            {f"{name} {one}": part for one, part in inside.items()} if inside else {name: command}
        )
    return found


COMMANDS = commands()


def test_commands_come_in_the_order_of_work(capsys: Capture) -> None:
    shown = cast(capsys, "--help").out.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in shown if line] == ORDER.split()
    assert cast(capsys, "-V").out.startswith("enginecast ")
    for group, order in GROUPS.items():
        shown = cast(capsys, group, "--help").out.partition("Commands:")[2].splitlines()
        assert [line.split()[0] for line in shown if line] == order.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_examples_that_it_takes(name: str, capsys: Capture) -> None:
    shown = cast(capsys, *name.split(), "--help").out
    for example in EXAMPLES[name]:
        assert f"  enginecast {example}\n" in shown
        words = example.replace("'", "").split()[len(name.split()) :]
        if "'" in example:  # a prompt of several words
            before, prompt, after = example.split("'")
            words = [*before.split()[len(name.split()) :], prompt, *after.split()]
        COMMANDS[name].make_context(name, words)
    for option in ("--config FILE.toml", "-q, --quiet", "-v, --verbose", "-h, --help"):
        assert option in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_options_are_in_groups(capsys: Capture) -> None:
    shown = cast(capsys, "export", "--help").out
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Arguments:",
        "Options:",
        "Precision and passes:",
        "Engine:",
        "TensorRT:",
        "AOTInductor:",
        "Model and inputs:",
        "Examples:",
    ]
    tensorrt = shown.partition("TensorRT:\n")[2].partition("\nAOTInductor:")[0]
    assert tensorrt.count("\n  --trt-") + tensorrt.startswith("  --trt-") == 8


def context(name: str, *words: str) -> dict[str, Any]:
    """The values that a command gets."""
    found: dict[str, Any] = COMMANDS[name].make_context(name, list(words), parent=ROOT).params
    return found


ROOT = typer.main.get_group(app).make_context("enginecast", ["doctor"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "export.toml"


def test_a_file_gives_options_and_the_command_line_comes_first(config: Path) -> None:
    config.write_text(
        """
        [export]
        model = "pkg:make"
        output = "out"
        precision = "fp16"
        dynamic = ["x:0=1..4", "x:1=2..8"]
        hidden-state = "-2"
        overwrite = true
        threads = 2
        max-error = 0.02
        [verify]
        json = true
        """
    )
    found = context("export", "--config", str(config))
    assert (found["model"], found["output"], found["precision"]) == (
        "pkg:make",
        Path("out"),
        "fp16",
    )
    assert (found["overwrite"], found["threads"], found["max_error"]) == (True, 2, 0.02)
    assert found["dynamic"] == ["x:0=1..4", "x:1=2..8"]
    assert found["hidden_states"] == ["-2"]
    assert found["as_json"] is False
    over = context("export", "m:f", "-o", "other", "--precision", "bf16", "--config", str(config))
    assert (over["model"], over["output"], over["precision"]) == ("m:f", Path("other"), "bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[export]\nprecison = 'fp16'", "export.precison: no such option\nDid you mean precision"),
        ("[export]\nconfig = 'x'", "export.config: no such option"),
        ("precision = 'fp16'", "precision: expected it in the table of a command\nPut it below"),
        ("[export]\noverwrite = 1", "export.overwrite: expected true or false, got 1"),
        ("[export]\nprecision = ['fp16']", "export.precision: expected one value, got ['fp16']"),
        ("[export]\nprecision = true", "export.precision: expected one value, got True"),
        ("[export]\ndynamic = {x = 1}", "export.dynamic: expected a list, got {'x': 1}"),
        ("export = 3", "export: expected a table, got 3"),
        ("[export", "Expected ']'"),
        (f"[export]\nthreads = {'9' * 5000}", "Exceeds the limit"),
        ("x = " + "[" * 100_000, "--config"),
        ("[export]\nthreads = 0", "--threads"),
    ],
)
def test_bad_files_are_one_error(config: Path, text: str, message: str, capsys: Capture) -> None:
    config.write_text(text)
    done = cast(capsys, "export", "m:f", "-o", "out", "--config", config)
    assert (done.code, done.out) == (2, "")
    assert message.lower() in done.err.lower()
    assert "Traceback" not in done.err


def test_quiet_leaves_results_and_errors(tmp_path: Path, capsys: Capture) -> None:
    assert cast(capsys, "doctor", tmp_path, "-q").out.endswith("nothing was left behind\n")
    done = cast(capsys, "inspect", tmp_path / MANIFEST_NAME, "--quiet")
    assert (done.code, done.err.startswith("error: ")) == (2, True)


def test_the_first_line_comes_before_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Last:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            sys.stderr.write('and now torch\\n')\n"
        "            raise ModuleNotFoundError('torch', name='torch')\n"
        "sys.meta_path.insert(0, Last())\n"
        "from enginecast.cli.app import main\n"
        "main()\n"
    )
    (tmp_path / "m.py").touch()
    (tmp_path / "a.txt").write_text("a red fox\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model_index.json").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / MANIFEST_NAME).touch()
    (tmp_path / "taken" / RECORD).touch()

    def said(*words: str) -> str:
        run = [sys.executable, "-c", code, *words]
        return subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path).stderr

    for words in (
        ("export", "m:f", "-o", "out"),
        ("diffusers", "export", "folder", "-o", "out"),
    ):
        assert said(*words).startswith("loading torch\nand now torch\n"), words
    assert said("export", "m:f", "-o", "out", "-q").startswith("and now torch\n")
    for early, expected in (
        (("export", "m:f", "-o", "taken"), "a bundle already exists"),
        (("export", "typo", "-o", "out"), "'typo' is not a model: no such file or folder"),
        (("opt", "m:f", "--pipeline", "typo"), "unknown pass 'typo'"),
        (("verify", "taken", "--model", "typo:f"), "No module named 'typo'"),
        (("cache", "fill", "typo", "--texts", "a.txt", "-o", "out"), "typo: expected a bundle"),
    ):
        message = said(*early)
        assert message.startswith("error: "), message
        assert expected in message


def test_json_has_a_version(tmp_path: Path, capsys: Capture) -> None:
    for words in (("passes",), ("doctor",), ("doctor", tmp_path), ("trust",), ("inspect", "no")):
        assert cast(capsys, *words, "--json").json["schema_version"] == 1
