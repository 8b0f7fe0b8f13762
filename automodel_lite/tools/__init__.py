"""What is done with a run beside training it: verify, report, merge.

Imports: every room below.
"""
