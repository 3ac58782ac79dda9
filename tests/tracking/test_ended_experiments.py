"""What is asked of an experiment that has ended: all its metrics, and whether it can go."""

from __future__ import annotations

import pathlib

import pytest
from driving import add_trials, report

from determined import errors, tracking
from determined.tracking import Changeset, ExperimentChange, RunState


def test_the_metrics_of_all_trials_are_those_of_each(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    ids = add_trials(store, 3)
    for id in ids[:2]:
        with tracking.TrialWriter.attach(database, 1, id, 1) as writer:
            writer.write([report(step, group=group) for step in (1, 2) for group in ("training", "validation")])
    for group in (None, "validation"):
        assert reader.metrics_by_trial(1, group) == {id: reader.metrics(id, group) for id in ids}
    with pytest.raises(errors.TrackingException, match="there is no experiment 2"):
        reader.metrics_by_trial(2)


def test_whether_an_experiment_can_be_deleted_is_asked_without_deleting_it(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    catalog = tracking.Catalog(database)
    with pytest.raises(errors.TrackingException, match="is at work on it"):
        catalog.require_deletable(1)
    store.commit(Changeset(experiment_change=ExperimentChange(state=RunState.COMPLETED)))
    store.release()
    catalog.require_deletable(1)
    assert len(reader.experiments()) == 1
