"""Help, options that every command has, and files of options."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from cache_shards import made
from exports import cast

from enginecast.cli.app import COMPLETE, app
from enginecast.cli.terminal.help import EXAMPLES, HELP, MANY
from enginecast.compiler.request import ModelOptions
from enginecast.errors import BundleError, UsageError
from enginecast.option_fields import TOPICS
from enginecast.pipelines.record import RECORD
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.load import load

Capture = pytest.CaptureFixture[str]
ORDER = (
    "inspect export verify report run generate bench tune opt bisect passes diffusers cache sign"
    " trust doctor"
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


def test_no_summary_is_cut(capsys: Capture) -> None:
    for group in ((), ("cache",), ("diffusers",), ("passes",)):
        shown = cast(capsys, *group, "--help").out.partition("Commands:")[2]
        assert shown
        assert "..." not in shown


def headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]


def test_options_are_in_groups(capsys: Capture) -> None:
    keys = "--target-option KEY=VALUE of --target"
    target = ["Target:", f"{keys} tensorrt:", f"{keys} tensorrt-rtx:"]
    assert headings(cast(capsys, "export", "--help-all").out) == [
        *("Arguments:", "Options:", "Precision and passes:", *target),
        *("Model and inputs:", "Verification:", "Examples:"),
    ]
    assert headings(cast(capsys, "export", "--help-target").out) == target


@pytest.mark.parametrize("name", COMMANDS)
def test_help_comes_in_parts(name: str, capsys: Capture) -> None:
    first, whole = (cast(capsys, *name.split(), word).out for word in ("--help", "--help-all"))
    options = [one for one in COMMANDS[name].params if one.param_type_name == "option"]
    options = [one for one in options if one.rich_help_panel != HELP]
    rows, _, rest = first.partition("Examples:")
    for one in options:
        spelled = max(one.opts, key=len)
        assert spelled in whole
        assert spelled in first  # its name, where not its help
        if len(options) > MANY:
            assert len(re.findall(r"^  -", rows, re.MULTILINE)) <= MANY + 2
            if one.rich_help_panel and spelled not in rows:
                assert f"--help-{TOPICS[one.rich_help_panel]}" in rest
    if "--precision" in first:
        assert re.search("Options:\n  --precision NAME", first)


def test_completion_knows_every_option(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPLETE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "enginecast export m --")
    monkeypatch.setenv("COMP_CWORD", "3")
    done = cast(capsys)
    assert (done.code, done.err) == (0, "")
    assert {"--stateful", "--target-option", "--help-target"} < set(done.out.split())
    assert not {"--state", "--trt-level"} & set(done.out.split())


def test_older_names_and_opposites_of_options(
    config: Path, capsys: Capture, recwarn: pytest.WarningsRecorder
) -> None:
    build = ("--trt-level", "3", "--trt-refit", "--opt-shape=x=1x2", "--opt-shape", "y=1")
    made = context("export", "m", "-o", "d", *build, "--state", "inputs", "--task=text-generation")
    texts = ["level=3", "refit=true", "opt-shape=x=1x2", "opt-shape=y=1"]
    assert (made["target_options"], made["stateful"], made["kv_cache"]) == (texts, True, True)
    assert capsys.readouterr().err.splitlines() == [
        "warning: --trt-level is now --target-option level=...",
        "warning: --trt-refit is now --target-option refit=true",
        "warning: --opt-shape is now --target-option opt-shape=...",
        "warning: --state is now --stateful",
        "warning: --task is now --kv-cache",
    ]
    config.write_text(
        "[export]\noverwrite = true\nno-speed = true\nstate = 'inputs'\ntrt-level = 3\n"
        "opt-shape = ['x=1x2', 'y=1']\ntarget-option = 'refit'\n"
    )
    words = ("m", "-o", "d", "--config", str(config), "--no-overwrite", "--speed")
    made = context("export", *words)
    assert made["target_options"] == ["level=3", "opt-shape=x=1x2", "opt-shape=y=1", "refit"]
    assert (made["overwrite"], made["no_speed"], made["stateful"]) == (False, False, True)
    assert context("run", "b", "-o", "o", "--trust", "--texts")["public_key"] == Path("--texts")
    assert context("cache fill", "e", "-o", "c", "--texts", "t")["prompts"] == Path("t")
    assert context("diffusers export", "f", "-o", "d", "--text", "a fox")["prompt"] == ["a fox"]
    assert context("export", "m", "-o", "d", "--state", "")["stateful"] is False
    refused = cast(capsys, "export", "m", "-o", "d", "--state", "memory")
    assert (refused.code, "--state memory: expected inputs" in refused.err) == (2, True)
    for name, value in (("state", "inputs"), ("task", "text-generation")):
        options = ModelOptions(**{name: value})  # type: ignore[arg-type]
        assert options == ModelOptions(stateful=name == "state", kv_cache=name == "task")
    refused = cast(capsys, "run", "b", "-o", "o", "--trust-digests=false")
    assert (refused.code, "--trust-digests takes no value" in refused.err) == (2, True)
    with pytest.raises(BundleError):
        load(config.parent, trust=config)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="trust and public_key are the same"):
        load(config.parent, public_key=config, trust=None)  # type: ignore[call-arg]
    assert [str(one.message) for one in recwarn] == [
        "state is now called stateful",
        "task is now called kv_cache",
        "trust is now called public_key",
        "trust is now called public_key",
    ]


def test_options_that_would_be_ignored_are_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / MANIFEST_NAME).touch()
    for words, named in (
        (
            ("inspect", tmp_path, "--precision", "int8", "--pipeline", "x"),
            "--precision, --pipeline",
        ),
        (("inspect", "m", "--target", "tensorrt", "--target-option", "level=3"), "level"),
        (("verify", tmp_path, "--random-weights", "1"), "--random-weights"),
        (("bench", tmp_path, "--download"), "--download"),
        (("opt", "m", "--pipeline", "canonicalize", "--watch", "--print-ir"), "--print-ir"),
    ):
        done = cast(capsys, *words)
        assert (done.code, named in done.err.splitlines()[0]) == (2, True), done.err


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


def test_a_file_that_is_not_there(config: Path, capsys: Capture) -> None:
    done = cast(capsys, "doctor", "--config", config)
    assert (done.code, "No such file or directory" in done.err) == (2, True)
    config.write_bytes(b"\xff")
    assert cast(capsys, "doctor", "--config", config).code == 2


def test_a_table_within_a_table(config: Path, tmp_path: Path, capsys: Capture) -> None:
    config.write_text("[cache.info]\njson = true\n")
    made(tmp_path / "cache")
    done = cast(capsys, "cache", "info", tmp_path / "cache", "--config", config)
    assert done.json["encoders"]


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
        ("inspect", "m:f"),
        ("opt", "m:f", "--pipeline", "canonicalize"),
        ("bisect", "m:f", "--precision", "fp16"),
        ("diffusers", "export", "folder", "-o", "out"),
    ):
        assert said(*words).startswith("loading torch\nand now torch\n"), words
        assert said(*words, "-q").startswith("and now torch\n"), words
    for early, expected in (
        (("export", "m:f", "-o", "taken"), "a bundle already exists"),
        (("export", "typo", "-o", "out"), "'typo' is not a model: no such file or folder"),
        (("export", "m.typo:f", "-o", "out"), "No module named 'm.typo'"),
        (("export", "m:f", "-o", "out", "--prompts", "none.txt"), "--prompts none.txt: No such"),
        (("inspect", "typo.pt2"), "typo.pt2 does not exist"),
        (("opt", "m:f", "--pipeline", "typo"), "unknown pass 'typo'"),
        (("bisect", "m:f", "--precision", "typo"), "'typo' is not a precision"),
        (("verify", "taken", "--model", "typo:f"), "No module named 'typo'"),
        (("diffusers", "export", "folder", "-o", "taken"), "already exists"),
        (("cache", "fill", "typo", "--prompts", "a.txt", "-o", "out"), "typo: expected a bundle"),
    ):
        message = said(*early)
        assert message.startswith("error: "), message
        assert expected in message


def test_json_has_a_version(tmp_path: Path, capsys: Capture) -> None:
    for words in (("passes",), ("doctor",), ("doctor", tmp_path), ("trust",), ("inspect", "no")):
        assert cast(capsys, *words, "--json").json["schema_version"] == 1
