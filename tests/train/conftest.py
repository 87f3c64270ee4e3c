"""Shared by the training tests."""

import jax
import pytest
from tiny_models import random_model, tiny_config
from training_runs import load, write_data


@pytest.fixture(scope="module", autouse=True)
def hurried_compiler():
    """Programs here run for a moment: compiling them well takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def target():
    return random_model(tiny_config(num_layers=3))


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    return load(write_data(tmp_path_factory.mktemp("data") / "a.npz"))
