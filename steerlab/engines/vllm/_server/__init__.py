"""`steerlab serve`: vLLM's OpenAI-compatible server, with steering by request.

A request passes through here in this order: `middleware` finds its `steering` field (`fields`), has `plans` make it a
plan along vectors of the `registry`, and leaves a ticket (`tickets`) in the request that vLLM sees. When vLLM has
tokenised it and hands it to its engine, `gateway` turns the ticket into what the workers need (`claims`, `workers`),
and into a receipt when the request ends. `serve` starts all of it.
"""
