"""Configs with one problem each: where it is, and words that must be said about it."""

from __future__ import annotations

from typing import NamedTuple

SEARCHER = "searcher: {name: single, metric: loss}"
ASHA = "name: adaptive_asha, metric: loss, max_trials: 9"


class Bad(NamedTuple):
    """A text (with a searcher below it, if it has none) that has one problem."""

    text: str
    line: int | None
    path: str
    words: str

    @property
    def whole(self) -> str:
        return self.text if "searcher:" in self.text else f"{self.text}\n{SEARCHER}\n"


TYPES = [
    Bad("name: 3", 1, "name", "it is not a string. Put it in quotes"),
    Bad("name: ''", 1, "name", "it is empty. Write name: digits."),
    Bad("description: [a]", 1, "description", '["a"]: it is not a string'),
    Bad("labels: baseline", 1, "labels", "it is not a list. Write labels: [baseline, cnn]."),
    Bad("labels: [a, yes]", 1, "labels[1]", "true: it is not a string. Put it in quotes"),
    Bad("labels: [a, '']", 1, "labels[1]", "it is empty"),
    Bad("debug: maybe", 1, "debug", '"maybe": it is neither true nor false. Write debug: true.'),
    Bad("perform_initial_validation: 1", 1, "perform_initial_validation", "1: it is neither true nor false"),
    Bad("\n\nmax_restarts: five", 3, "max_restarts", '"five": it is not an integer. Write max_restarts: 2.'),
    Bad("max_restarts: 5.0", 1, "max_restarts", "it is not an integer. Write max_restarts: 5."),
    Bad("max_restarts: '5'", 1, "max_restarts", "Write max_restarts: 5, without quotes."),
    Bad("max_restarts: true", 1, "max_restarts", "true: it is not an integer"),
    Bad("max_restarts: -1", 1, "max_restarts", "-1: it is less than 0"),
    Bad("max_restarts: 99999999999", 1, "max_restarts", "it is more than 2147483647"),
    Bad("scheduling_unit: 0", 1, "scheduling_unit", "0: it is less than 1. Write scheduling_unit: 50."),
    Bad("records_per_epoch: -3", 1, "records_per_epoch", "it is less than 0"),
    Bad("preemption_timeout: soon", 1, "preemption_timeout", "it is not an integer"),
    Bad("checkpoint_policy: bets", 1, "checkpoint_policy", "not one of best, all, none. Did you mean best?"),
    Bad("checkpoint_policy: 3", 1, "checkpoint_policy", "3: it is not one of best, all, none. Write checkpoint_policy"),
    Bad("data: [1, 2]", 1, "data", "it is not a mapping. Write data: {"),
    Bad("profiling: true", 1, "profiling", "it is not a mapping. Write profiling: {enabled: true}."),
]
KEYS = [
    Bad("hyperparmeters: {lr: 1}", 1, "hyperparmeters", "no such key here. Did you mean hyperparameters?"),
    Bad("a: 1", 1, "a", "The keys here are name, description,"),
    Bad("lr: 0.1", 1, "lr", "Hyperparameters go below hyperparameters"),
    Bad("max_trials: 3", 1, "max_trials", "It belongs below searcher."),
    Bad("slots_per_trial: 3", 1, "slots_per_trial", "It belongs below resources."),
    Bad("resources:\n  slots: 3", 2, "resources.slots", "no such key here. Did you mean max_slots?"),
    Bad("optimizations: {precision: fp16}", 1, "optimizations.precision", "Did you mean mixed_precision?"),
    Bad("'a.b': 1", 1, '"a.b"', "no such key here"),
    Bad("1: 2", 1, "1", 'the key is not a string. Put it in quotes: "1".'),
    Bad("data: {on: 2}", 1, "data.on", "the key is not a string"),
    Bad("data:\n  ? [a, b]\n  : 3", 2, 'data."?"', "the key is a mapping or a list"),
    Bad("name: a\ndebug: true\nname: b", 1, "name", "the key is given twice, on lines 1 and 3. Remove one"),
    Bad("data:\n  x: {a: 1,\n   a: 2}", 2, "data.x.a", "twice, on lines 2 and 3"),
    Bad("data: {<<: 3}", 1, "data", "what << merges is not a mapping"),
]
SEARCHERS = [
    Bad("name: a # no searcher:", None, "searcher", "it is required. Write searcher: {name: random"),
    Bad("searcher: single", 1, "searcher", '"single": it is not a mapping'),
    Bad("searcher: {metric: loss}", 1, "searcher.name", "required. Write name: adaptive_asha, async_halving, custom"),
    Bad("searcher:\n  name: randm\n  metric: a", 2, "searcher.name", "Did you mean random?"),
    Bad("searcher: {name: 3, metric: a}", 1, "searcher.name", "3: it is not one of adaptive_asha, async_halving"),
    Bad("searcher: {name: adaptive_simple, metric: a}", 1, "searcher.name", "Did you mean adaptive_asha?"),
    Bad("searcher: {name: single}", 1, "searcher.metric", "it is required. Write metric: validation_loss."),
    Bad("searcher: {name: single, metric: ''}", 1, "searcher.metric", "it is empty"),
    Bad(
        "searcher: {name: single, metric: a, smaller_is_better: no way}",
        1,
        "searcher.smaller_is_better",
        "neither true",
    ),
    Bad("searcher: {name: random, metric: a}", 1, "searcher.max_trials", "it is required. Write max_trials: 100."),
    Bad("searcher: {name: random, metric: a, max_trials: 1e3}", 1, "searcher.max_trials", "Write max_trials: 1000."),
    Bad("searcher: {name: random, metric: a, max_trials: 0}", 1, "searcher.max_trials", "it is less than 1"),
    Bad(
        "searcher: {name: gp, metric: a, max_trials: 3, n_startup_trials: -1}",
        1,
        "searcher.n_startup_trials",
        "less than 0",
    ),
    Bad(
        "searcher: {name: grid, metric: a, max_trials: 3}",
        1,
        "searcher.max_trials",
        "It belongs to name: adaptive_asha, async",
    ),
    Bad("searcher: {name: single, metric: a, mode: standard}", 1, "searcher.mode", "belongs to name: adaptive_asha."),
    Bad(
        "searcher: {name: tpe, metric: a, max_trials: 3,\n source_trial_id: 3,\n source_checkpoint_uuid: ab}",
        3,
        "searcher.source_checkpoint_uuid",
        "a warm start has one source",
    ),
    Bad("searcher: {name: single, metric: a, source_trial_id: 0}", 1, "searcher.source_trial_id", "less than 1"),
    Bad(f"searcher: {{{ASHA}, max_time: 3}}", 1, "searcher.time_metric", "required. Write time_metric: epochs."),
    Bad(f"searcher: {{{ASHA}, time_metric: epochs}}", 1, "searcher.max_time", "required. Write max_time: 27."),
    Bad(f"searcher: {{{ASHA}, time_metric: a, max_time: 0}}", 1, "searcher.max_time", "less than 1"),
    Bad(
        f"searcher: {{{ASHA}, time_metric: a, max_time: 9, divisor: 1}}",
        1,
        "searcher.divisor",
        "not above 1. Write divisor",
    ),
    Bad(
        f"searcher: {{{ASHA}, time_metric: a, max_time: 9, mode: wild}}",
        1,
        "searcher.mode",
        "standard, conservative, agg",
    ),
    Bad(f"searcher: {{{ASHA}, time_metric: a, max_time: 9, max_rungs: 0}}", 1, "searcher.max_rungs", "less than 1"),
    Bad(
        f"searcher: {{{ASHA}, time_metric: a, max_time: 9, bracket_rungs: [3, 0]}}",
        1,
        "searcher.bracket_rungs[1]",
        "0: it is less than 1. Write bracket_rungs: [4, 3].",
    ),
    Bad(
        f"searcher: {{{ASHA}, time_metric: a, max_time: 9, bracket_rungs: 3}}",
        1,
        "searcher.bracket_rungs",
        "not a list",
    ),
    Bad(
        f"searcher: {{{ASHA}, time_metric: a, max_time: 9, divisor: 1e9, bracket_rungs: [2, 99]}}",
        1,
        "searcher.bracket_rungs[1]",
        "allows fewer rungs",
    ),
    Bad(
        "searcher: {name: async_halving, metric: a, max_trials: 9, time_metric: a, max_time: 9}",
        1,
        "searcher.num_rungs",
        "required. Write num_rungs: 4.",
    ),
    Bad(
        "searcher: {name: async_halving, metric: a, max_trials: 9, time_metric: a,\n"
        "  max_time: 9, num_rungs: 90, divisor: 1e8}",
        2,
        "searcher.num_rungs",
        "allows fewer rungs",
    ),
    Bad("searcher: {name: custom, metric: a}", 1, "searcher.method", "Write method: my_search:Method."),
    Bad("searcher: {name: custom, metric: a, method: my_search}", 1, "searcher.method", "not of the form module:Class"),
    Bad("searcher: {name: custom, metric: a, method: m:C, options: 3}", 1, "searcher.options", "not a mapping"),
]
LENGTHS = [
    Bad(
        "min_validation_period: often", 1, "min_validation_period", '"often": it is not a length. Write {batches: 1000}'
    ),
    Bad("min_validation_period: true", 1, "min_validation_period", "true: it is not a length"),
    Bad("min_validation_period: 1.5", 1, "min_validation_period", "it is not a length"),
    Bad("min_checkpoint_period: {}", 1, "min_checkpoint_period", "exactly one of batches, records, epochs, not none"),
    Bad("min_checkpoint_period: {batches: 1, epochs: 2}", 1, "min_checkpoint_period", "not batches and epochs"),
    Bad(
        "min_checkpoint_period: {hours: 3}",
        1,
        "min_checkpoint_period.hours",
        "The keys here are batches, records, epochs",
    ),
    Bad("min_checkpoint_period: {batches: -3}", 1, "min_checkpoint_period.batches", "it is less than 0"),
    Bad("searcher: {name: single, metric: a, max_length: 0}", 1, "searcher.max_length", "length 0 learns nothing"),
    Bad(
        "searcher: {name: single, metric: a, max_length: {epochs: 0.5}}",
        1,
        "searcher.max_length.epochs",
        "not an integer",
    ),
    Bad(f"searcher: {{{ASHA}, time_metric: tokens, max_length: 5}}", 1, "searcher.max_time", "it is required"),
    Bad(f"searcher: {{{ASHA}, max_length: often}}", 1, "searcher.max_length", "it is not a length"),
    Bad(f"searcher: {{{ASHA}, max_length: 0}}", 1, "searcher.max_length", "length 0 learns nothing"),
    Bad(
        f"searcher: {{{ASHA}, max_length: {{records: 9}}}}", 1, "searcher.max_length", "global_batch_size: 64 in hyperp"
    ),
    Bad(
        "hyperparameters: {global_batch_size: {type: int, minval: 1, maxval: 9}}\n"
        f"searcher: {{{ASHA}, max_length: {{records: 9}}}}",
        2,
        "searcher.max_length",
        "must be a constant",
    ),
    Bad("entrypoint: m:T", 2, "searcher.max_length", "needs a training length. Write max_length: {epochs: 10}."),
    Bad(
        f"entrypoint: m:T\nsearcher: {{{ASHA}, time_metric: tokens, max_time: 9}}",
        2,
        "searcher.max_length",
        "'tokens' counts neither batches nor epochs",
    ),
    Bad(
        "entrypoint: m:T\nmin_validation_period: {records: 9}\nsearcher: {name: single, metric: a, max_length: 3}",
        2,
        "min_validation_period",
        "records are counted in batches of hyperparameters.global_batch_size",
    ),
]
HYPERPARAMETERS = [
    Bad("hyperparameters: [1]", 1, "hyperparameters", "it is not a mapping"),
    Bad(
        "hyperparameters:\n  a: {type: itn, minval: 1}",
        2,
        "hyperparameters.a.type",
        '"itn": it is not one of const, int, double',
    ),
    Bad("hyperparameters: {a: {type: itn, maxval: 3}}", 1, "hyperparameters.a.type", "Did you mean int?"),
    Bad("hyperparameters: {a: {type: adam, base: 1}}", 1, "hyperparameters.a.type", "type: {type: const, val: adam}"),
    Bad("hyperparameters: {a: {type: 3, vals: [1]}}", 1, "hyperparameters.a.type", "3: it is not one of"),
    Bad("hyperparameters: {a: {type: const}}", 1, "hyperparameters.a.val", "it is required"),
    Bad(
        "hyperparameters: {a: {type: const, val: 1, vals: 1}}",
        1,
        "hyperparameters.a.vals",
        "belongs to type: categorical",
    ),
    Bad(
        "hyperparameters: {a: {type: int, maxval: 1}}",
        1,
        "hyperparameters.a.minval",
        "it is required. Write minval: 8.",
    ),
    Bad("hyperparameters: {a: {type: int, minval: 1.5, maxval: 9}}", 1, "hyperparameters.a.minval", "not an integer"),
    Bad("hyperparameters: {a: {type: int, minval: 3, maxval: 3}}", 1, "hyperparameters.a.minval", "not below maxval=3"),
    Bad(
        "hyperparameters: {a: {type: int, minval: -9223372036854775807, maxval: 9223372036854775807}}",
        1,
        "hyperparameters.a.maxval",
        "too wide a range",
    ),
    Bad(
        "hyperparameters: {a: {type: double, minval: low, maxval: 1}}", 1, "hyperparameters.a.minval", "is not a number"
    ),
    Bad(
        "hyperparameters: {a: {type: double, minval: no, maxval: 1}}", 1, "hyperparameters.a.minval", "is not a number"
    ),
    Bad(
        "hyperparameters: {a: {type: double, minval: .nan, maxval: 1}}", 1, "hyperparameters.a.minval", "finite number"
    ),
    Bad(
        "hyperparameters: {a: {type: double, minval: -1e308, maxval: 1e308}}", 1, "hyperparameters.a.maxval", "too wide"
    ),
    Bad("hyperparameters: {a: {b: {type: log, minval: 1, maxval: 0}}}", 1, "hyperparameters.a.b.minval", "not below"),
    Bad("hyperparameters: {a: {type: log, minval: 1, maxval: 999}}", 1, "hyperparameters.a.maxval", "too wide"),
    Bad("hyperparameters: {a: {type: log, base: 0, minval: 1, maxval: 2}}", 1, "hyperparameters.a.base", "not above 0"),
    Bad(
        "hyperparameters: {a: {type: int, minval: 1, maxval: 2, count: 0}}", 1, "hyperparameters.a.count", "less than 1"
    ),
    Bad(
        "hyperparameters: {a: {type: categorical, vals: []}}", 1, "hyperparameters.a.vals", "it is empty. Write vals: ["
    ),
    Bad("hyperparameters: {a: {type: categorical, vals: 3}}", 1, "hyperparameters.a.vals", "3: it is not a list"),
    Bad("hyperparameters: {global_batch_size: 0}", 1, "hyperparameters.global_batch_size", "integer of at least 1"),
    Bad(
        "hyperparameters: {global_batch_size: '8'}",
        1,
        "hyperparameters.global_batch_size",
        "Write global_batch_size: 64.",
    ),
    Bad(
        "hyperparameters: {global_batch_size: {type: log, minval: 1, maxval: 2}}",
        1,
        "hyperparameters.global_batch_size",
        "not an integer",
    ),
    Bad(
        "hyperparameters: {global_batch_size: {type: categorical, vals: [8, 0]}}",
        1,
        "hyperparameters.global_batch_size",
        "not an integer",
    ),
    Bad(
        "hyperparameters: {global_batch_size: 3}\nresources: {slots_per_trial: 4}",
        1,
        "hyperparameters.global_batch_size",
        "a batch of 3 records cannot be divided among 4 slots",
    ),
    Bad(
        "hyperparameters:\n  a: {type: double, minval: 0, maxval: 1}\nsearcher: {name: grid, metric: a}",
        2,
        "hyperparameters.a.count",
        "a grid search needs it. Write count: 5.",
    ),
    Bad(
        "hyperparameters:\n  a: &a {type: double, minval: 0, maxval: 1, count: 2000}\n  b: *a\n"
        "searcher: {name: grid, metric: a}",
        1,
        "hyperparameters",
        "the grid has 4000000 points",
    ),
]
SECTIONS = [
    Bad("entrypoint: ''", 1, "entrypoint", "Write entrypoint: model_def:MyTrial"),
    Bad("entrypoint: []", 1, "entrypoint", "neither a string"),
    Bad("entrypoint: [python3, 3]", 1, "entrypoint", '["python3", 3]: it is neither a string'),
    Bad("entrypoint: {a: b}", 1, "entrypoint", "neither a string"),
    Bad("workspace: vision", None, "project", "workspace is given without it. Write both"),
    Bad("project: digits", None, "workspace", "project is given without it"),
    Bad("resources: {slots_per_trial: -1}", 1, "resources.slots_per_trial", "it is less than 1"),
    Bad("resources: {slots_per_trial: false}", 1, "resources.slots_per_trial", "false: it is not an integer"),
    Bad("resources: {slots_per_trial: 8, max_slots: 4}", 1, "resources.slots_per_trial", "never fits into max_slots=4"),
    Bad(
        "resources: {slots_per_trial: {min: 3, max: 2}}",
        1,
        "resources.slots_per_trial.max",
        "2: it is less than min: 3. Write max: 3 or more.",
    ),
    Bad("resources: {slots_per_trial: {min: 0, max: 2}}", 1, "resources.slots_per_trial.min", "it is less than 1"),
    Bad("resources: {slots_per_trial: {min: 2}}", 1, "resources.slots_per_trial.max", "it is required"),
    Bad("resources: {slots_per_trial: {maxi: 2, max: 2}}", 1, "resources.slots_per_trial.maxi", "Did you mean max?"),
    Bad(
        "resources: {slots_per_trial: {min: 5, max: 8}, max_slots: 4}",
        1,
        "resources.slots_per_trial",
        "a trial that needs 5 slots never fits into max_slots=4",
    ),
    Bad("resources: {priority: 100}", 1, "resources.priority", "it is more than 99. Write priority: 42."),
    Bad("reproducibility: {experiment_seed: 4294967296}", 1, "reproducibility.experiment_seed", "more than 4294967295"),
    Bad("reproducibility: {experiment_seed: -1}", 1, "reproducibility.experiment_seed", "less than 0"),
    Bad(
        "profiling: {begin_on_batch: 9, end_after_batch: 3}", 1, "profiling.end_after_batch", "before begin_on_batch=9"
    ),
    Bad("retention_policy: {log_retention_days: -2}", 1, "retention_policy.log_retention_days", "less than -1"),
    Bad("retention_policy: {log_retention_days: 32768}", 1, "retention_policy.log_retention_days", "more than 32767"),
    Bad("log_policies: {pattern: a}", 1, "log_policies", "it is not a list"),
    Bad(
        "log_policies:\n - pattern: a\n - pattern: '('",
        3,
        "log_policies[1].pattern",
        "not a regular expression (missing )",
    ),
    Bad("log_policies: [{action: cancel_retries}]", 1, "log_policies[0].pattern", "it is required"),
    Bad("log_policies: [{pattern: a, action: cancel}]", 1, "log_policies[0].action", "Did you mean cancel_retries?"),
    Bad("log_policies: [{action: cancel_retries}]", 1, "log_policies[0].pattern", "it is required"),
    Bad("log_policies: [a]", 1, "log_policies[0]", '"a": it is not a mapping'),
    Bad("optimizations: {aggregation_frequency: 0}", 1, "optimizations.aggregation_frequency", "less than 1"),
    Bad("optimizations: {mixed_precision: O4}", 1, "optimizations.mixed_precision", "bf16, fp16, O0, O1, O2, O3"),
    Bad("optimizations: {compile: fast}", 1, "optimizations.compile", "not true, false or a mapping"),
    Bad("optimizations: {cuda_graphs: 1}", 1, "optimizations.cuda_graphs", "not true, false or a mapping"),
    Bad("optimizations: {tf32: high}", 1, "optimizations.tf32", "neither true nor false. Write tf32: true."),
    Bad("environment: {environment_variables: [A=1, B]}", 1, "environment.environment_variables[1]", "NAME=value"),
    Bad(
        "environment: {environment_variables: {cpu: [=1]}}", 1, "environment.environment_variables.cpu[0]", "NAME=value"
    ),
    Bad(
        "environment: {environment_variables: {A: b}}",
        1,
        "environment.environment_variables.A",
        "keys here are cpu, cuda",
    ),
]
STORAGE = [
    Bad("checkpoint_storage: /data", 1, "checkpoint_storage", '"/data": it is not a mapping'),
    Bad(
        "checkpoint_storage: {type: ftp}",
        1,
        "checkpoint_storage.type",
        "not one of shared_fs, directory, gcs, s3, azure",
    ),
    Bad("checkpoint_storage: {type: shared_f}", 1, "checkpoint_storage.type", "Did you mean shared_fs?"),
    Bad("checkpoint_storage: {type: 3}", 1, "checkpoint_storage.type", "3: it is not one of"),
    Bad("checkpoint_storage: {host_path: /a}", 1, "checkpoint_storage.host_path", "It belongs to type: shared_fs."),
    Bad("checkpoint_storage: {save_trial_best: -1}", 1, "checkpoint_storage.save_trial_best", "less than 0"),
    Bad("checkpoint_storage: {type: shared_fs}", 1, "checkpoint_storage.host_path", "it is required"),
    Bad(
        "checkpoint_storage: {type: shared_fs, host_path: a}", 1, "checkpoint_storage.host_path", "not an absolute path"
    ),
    Bad(
        "checkpoint_storage: {type: shared_fs, host_path: /a, storage_path: ../b}",
        1,
        "checkpoint_storage.storage_path",
        "it leaves host_path='/a'",
    ),
    Bad(
        "checkpoint_storage: {type: directory, container_path: ./a}", 1, "checkpoint_storage.container_path", "absolute"
    ),
    Bad("checkpoint_storage: {type: s3}", 1, "checkpoint_storage.bucket", "required. Write bucket: my-bucket."),
    Bad(
        "checkpoint_storage: {type: s3, bucket: b, prefix: a/../b}", 1, "checkpoint_storage.prefix", "leaves the bucket"
    ),
    Bad("checkpoint_storage: {type: s3, bucket: b, access_key: k}", 1, "checkpoint_storage.secret_key", "go together"),
    Bad(
        "checkpoint_storage: {type: s3, bucket: b, endpoint_url: minio}",
        1,
        "checkpoint_storage.endpoint_url",
        "not a URL",
    ),
    Bad("checkpoint_storage: {type: gcs, bucket: ''}", 1, "checkpoint_storage.bucket", "it is empty"),
    Bad(
        "checkpoint_storage: {type: azure, container: c, connection_string: s, account_url: 'https://me.x'}",
        1,
        "checkpoint_storage",
        "one of connection_string and account_url",
    ),
    Bad(
        "checkpoint_storage: {type: azure, container: c, connection_string: s, credential: k}",
        1,
        "checkpoint_storage.credential",
        "it goes with account_url",
    ),
]
TREES = [
    Bad("data: {x: .inf}", 1, "data.x", "Infinity: it is not a finite number"),
    Bad("data: {x: [1, -1e999]}", 1, "data.x[1]", "-Infinity: it is not a finite number"),
    Bad("data: {x: 9223372036854775808}", 1, "data.x", "too large a number. Write at most 9223372036854775807"),
    Bad(f"data: {{x: {'9' * 5000}}}", 1, "data.x", "it cannot be read as int"),
    Bad("data: {x: !!int ''}", 1, "data.x", "it cannot be read as int"),
    Bad("data: {x: !!bool perhaps}", 1, "data.x", "it cannot be read as bool"),
    Bad("data: {x: !!python/name:os.system ''}", 1, "data.x", "python/name:os.system is not known"),
    Bad("data: {x: !secret a}", 1, "data.x", "the tag !secret is not known. Write the value without a tag."),
    Bad("data: {x: !!binary aGk=}", 1, "data.x", "binary is not known"),
    Bad("data: !!set {a, b}", 1, "data", "set is not known"),
    Bad('data: {x: "\\ud83d"}', 1, "data.x", "half a Unicode character"),
    Bad('data: {x: "a\\0b"}', 1, "data.x", "NUL character"),
    Bad('data: {"a\\0b": 1}', 1, "data", "a key that has a NUL character"),
    Bad(f"data:\n{'- ' * 60}a", 2, "data[0][0]", "nested more than 50 levels deep"),
    Bad("data: &a [*a]", 1, "data[0][0]", "nested more than 50 levels deep"),
    Bad(
        "description: &a [x, x, x, x, x, x, x, x, x, x]\nlabels: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
        "workspace: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\nproject: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\n"
        "data: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d, *d]",
        5,
        "data",
        "more than 100000 values",
    ),
]
WHOLE = [
    Bad("searcher: [", 1, "", "it is not YAML"),
    Bad("searcher:\n\tname: single", 2, "", "Indent with spaces, not with tabs."),
    Bad("searcher: {name: single\nmetric: a", 2, "", "it is not YAML"),
    Bad("searcher: a: b", 1, "", 'mapping values are not allowed here, at column 12 of "searcher: a: b"'),
    Bad("searcher: *a", 1, "", "undefined alias 'a'"),
    Bad("searcher: {a: b}\n---\nname: a", 2, "", "it is not YAML: expected a single document"),
    Bad("- searcher:", 1, "", "an experiment config is a mapping of keys and values. Write at least searcher: {name"),
    Bad("# searcher: all is comment", None, "", "it is empty"),
    Bad("name: a\nsearcher: \x07", 2, "", "it has the character U+0007"),
    Bad(f"searcher: {'[' * 90_000}", 1, "", "brackets within more than 50 brackets, at column"),
    Bad("&a {<<: *a, searcher: 1}", None, "", "it is nested too deep"),
]
ALL = [*TYPES, *KEYS, *SEARCHERS, *LENGTHS, *HYPERPARAMETERS, *SECTIONS, *STORAGE, *TREES, *WHOLE]
