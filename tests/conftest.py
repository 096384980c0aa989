from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # the signals are short: on a busy machine, threads wait for one another far longer than they work


def pytest_configure(config: pytest.Config) -> None:
    # Many cases have more filters than bins on purpose; test_tables and test_module look at the warnings themselves.
    config.addinivalue_line("filterwarnings", "ignore:.*mel filters are zero everywhere")
    config.addinivalue_line("filterwarnings", "ignore:At least one mel filterbank has all zero values")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False"))
