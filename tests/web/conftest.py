from __future__ import annotations

from collections.abc import Iterator

import pytest
from site_of_tests import Site, served


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A page over a home folder that the tests of a module share."""
    with served(tmp_path_factory.mktemp("home")) as served_site:
        yield served_site
