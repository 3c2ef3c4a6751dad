"""Faults in whole exports, from the command to the bundle: disks that are full, and kills."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults.campaign import Campaign, Sizes, Tally, environment, lacks_own_disks

SEED = 37
POINTS = 65
"""Of a full disk, for each exporter: from no room at all to more than the bundle takes."""
TARGETS = ("onnxruntime", "torchscript", "aotinductor")


@contextmanager
def exporter(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that exports in workers; see exporter.py."""
    command = ["unshare", "-rm", sys.executable, "-W", "ignore", "-m", "faults.exporter"]
    with subprocess.Popen(
        [*command, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def export(process: "subprocess.Popen[str]", target: str, **fault: Any) -> dict[str, Any]:
    """Export once; what came of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    request = {"target": target, "room": None, "kill": None} | fault
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    assert isinstance(found, dict)
    return found


def harm(found: dict[str, Any], codes: tuple[int, ...]) -> str:
    """What is wrong with what an export left, if anything."""
    code, said = found["code"], found["said"]
    if code not in (0, *codes):
        return f"it ended with {code}: {said}"
    wanted = {0: ("new",), 3: ("old",)}.get(code, ("old", "new"))
    if found["before"] not in wanted or found["after"] != found["before"]:
        return f"the name holds {found['before']}, then {found['after']}"
    if code >= 0 and found["left"]:
        return f"it left {found['left']}"
    if found["uncleaned"]:
        return f"cleaning left {found['uncleaned']}"
    if code == 3 and not (f"\n{said}".count("\nerror: ") == 1 and "No space left" in said):
        return f"not one clear error: {said}"
    if code == 3 and "/place/" not in said:
        return f"the error names no folder: {said}"
    return ""


def full_disks(count: int, folder: Path) -> Tally:
    """Export to disks that have room for so many 64ths of the bundle."""
    tally = Tally()
    targets = TARGETS if count >= POINTS * len(TARGETS) else TARGETS[:1]
    with exporter(folder) as process:
        for number in range(count):
            target = targets[number % len(targets)]
            point = number // len(targets) * (POINTS - 1) // (max(count // len(targets), 2) - 1)
            room = 4.0 if point == POINTS - 1 else point / (POINTS - 1)
            found = export(process, target, room=room)
            wrong = harm(found, (3,))
            if wrong or (room == 4.0 and found["code"]):
                tally.defect(f"{target}, room for {point} of {POINTS - 1}: {wrong or found}")
            else:
                fits = found["code"] == 0
                tally.add("the bundle fit" if fits else "refused, old bundle kept", fired=not fits)
    return tally


def kills(count: int, folder: Path) -> Tally:
    """Kill as many exports: at any moment, while files are written, and around their renames.

    Some are done before they are killed; others take their places.
    """
    tally, chooser = Tally(), random.Random(SEED)
    quick = count < 20
    with exporter(folder) as process:
        number = 0
        while tally.fired < count and not tally.defects and number < 2 * count:
            target = TARGETS[0] if quick else TARGETS[2 if number % 10 == 9 else number % 2]
            when = ("any", "files", "manifest")[number % 3 if quick else number // 2 % 3]
            share = chooser.random()
            number += 1
            found = export(process, target, kill=[when, share])
            wrong = harm(found, (-9,))
            if wrong:
                tally.defect(f"{target}, killed after {share:.3f} of {when!r}: {wrong}")
            else:
                fired = found["code"] == -9
                what = f"killed, {found['before']} bundle there" if fired else "it was done before"
                tally.add(what, fired=fired)
    return tally


CAMPAIGNS = (
    Campaign(
        "full disks",
        "An export to a disk that fills up at any point ends with one error and exit code 3; the"
        " old bundle is as it was, and nothing else is left.",
        Sizes(quick=5, full=POINTS * len(TARGETS)),
        full_disks,
        fires=0.6,
        lacks=lacks_own_disks,
    ),
    Campaign(
        "kills of exports",
        "Whenever an export is killed, the name holds the old bundle or the new one, whole, and"
        " `doctor --clean` removes what is beside it.",
        Sizes(quick=3, full=200),
        kills,
        fires=0.6,
        lacks=lacks_own_disks,
    ),
)
