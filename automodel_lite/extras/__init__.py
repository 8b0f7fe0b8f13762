"""Programs around the core, which imports none of it: the training client, planning, reports, the
hub, tools of the command line.
"""
