import json

import pytest
from training_helpers import Trainer, end, log_of, tiny, write_text

from keyhole.training.loop import train


@pytest.fixture
def folder(tmp_path):
    """A folder with a small text in it."""
    write_text(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def _server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    write_text(folder)
    trainer = Trainer(folder)
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(_server, folder):
    """Trainings in processes of their own, on the text in `folder`."""
    home, _server.folder = _server.folder, folder
    yield _server
    _server.folder = home


@pytest.fixture(scope="session")
def undisturbed(_server, tmp_path_factory):
    """How a run ends that nobody disturbs; made once for each recipe."""
    known = {}

    def run(recipe):
        key = json.dumps(recipe, sort_keys=True)
        if key not in known:
            out = tmp_path_factory.mktemp("whole") / "run"
            assert _server.run(recipe, out) == 0, log_of(out).read_text()
            known[key] = end(out)
        return known[key]

    return run


@pytest.fixture
def whole(folder):
    """How the tiny run ends when all goes well."""
    train(tiny(folder), folder / "whole", quiet=True)
    return end(folder / "whole")
