"""Where ranks meet that no launcher of ours has started."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

import ranks
from determined import pytorch

pytestmark = pytest.mark.process


def listening() -> set[str]:
    with pytorch.init():
        found = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        return {at.ip for at in found if at.port == int(os.environ["MASTER_PORT"])}


def test_store_of_ranks_on_one_machine_listens_at_their_address_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    assert ranks.run(listening, 2, environment=environment) == [{"127.0.0.1"}] * 2
