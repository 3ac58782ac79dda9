"""What is asked of an experiment that has ended: all its metrics, and whether it can go."""

from __future__ import annotations

import pathlib

import pytest
from driving import add_trials, report

from determined import errors, tracking
from determined.tracking import Changeset, ExperimentChange, RunState


def test_the_metrics_of_all_trials_are_those_of_each(
    ledger: tracking.ExperimentStore, records: tracking.TrackingReader, database: pathlib.Path
) -> None:
    ids = add_trials(ledger, 3)
    for id in ids[:2]:
        with tracking.TrialWriter.attach(database, 1, id, 1) as recorder:
            recorder.write([report(step, group=group) for step in (1, 2) for group in ("training", "validation")])
    for group in (None, "validation"):
        assert records.metrics_by_trial(1, group) == {id: records.metrics(id, group) for id in ids}
    with pytest.raises(errors.TrackingException, match="there is no experiment 2"):
        records.metrics_by_trial(2)


def test_whether_an_experiment_can_be_deleted_is_asked_without_deleting_it(
    ledger: tracking.ExperimentStore, records: tracking.TrackingReader, database: pathlib.Path
) -> None:
    catalog = tracking.Catalog(database)
    with pytest.raises(errors.TrackingException, match="is at work on it"):
        catalog.require_deletable(1)
    ledger.commit(Changeset(experiment_change=ExperimentChange(state=RunState.COMPLETED)))
    ledger.release()
    catalog.require_deletable(1)
    assert len(records.experiments()) == 1
