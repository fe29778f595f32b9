"""What users rely on, recorded as data: a test fails where a change of the code changes it.

Frozen are commands, flags, exit codes, configurations, paths and shapes of parameters, and the imports of documents.
Not frozen are the wording of messages and where classes lie. ``python -m tests.frozen.record [NAME ...]`` records anew
what a change is meant to change; the difference of the JSON files shows it to the reviewer.
"""
