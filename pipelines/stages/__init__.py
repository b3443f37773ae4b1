"""The stages of a study: `prepare`, `evaluate`, `choose_slot`, `search_scales`, `sample`, `distill`, `analyze`.

Shared by them: `stage` and `plan_context` (what a stage is, and what it is planned from), `resolve` and `made_from`
(inputs), `predictions` and `parts_loop` (results that are stored as they come).
"""
