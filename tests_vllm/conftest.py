"""One server for all tests that do not break it: a start takes half a minute."""

from collections.abc import Iterator

import pytest
import torch

from tests_vllm.engines import Engine, engine

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A server of the zoo's first policy. Each test publishes what it needs."""
    with engine("softmax router", tmp_path_factory.mktemp("shared")) as made:
        yield made
