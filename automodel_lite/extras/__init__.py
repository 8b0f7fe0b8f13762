"""What a command or a name of the Python interface leads to: planning, the dry run, reports, the
training client, the hub, tools of the command line. The core imports none of it.
"""
