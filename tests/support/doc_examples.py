"""Run the examples of docstrings."""

import doctest
import inspect


def run_example(owner: object, name: str) -> None:
    """Run the example of a function or class, in the current folder; fail where it has none."""
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(owner) or "", {}, name, None, 0)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(test, out=said.append)
    assert not said, "".join(said)
