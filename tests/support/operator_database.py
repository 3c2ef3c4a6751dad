"""torch's operator database, by the names of its operators and their variants."""

import sys
import unittest
import warnings
from types import SimpleNamespace

# The database is part of torch's test tools, which want this package for a base class alone.
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

OPERATORS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
