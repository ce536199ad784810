"""What an experiment writes, and how it is read back.

::

    run.json              name, model, configuration, versions, and the list of what was measured
    cells/                scores/0f3a….parquet, …: finished measurements, each under the hash of what determines it
    inputs/               plans/….json, data/….json, each under its own hash; operators/….json of a user's own
    effects/000/          effect.json, plan.json, rows.parquet, cost.parquet
    frames/               cost-000.parquet, entropy-000.parquet, generations-000.parquet, …
    findings/             selection-000/finding.json with its frames, …
    vectors/000.safetensors
    looks/000000.json     what measured on which items, in order
    manifest.jsonl        the hash of every file above, as it was written
    report.html

Every file is written whole: a reader sees the old one or the new one.
"""
