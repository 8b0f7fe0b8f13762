"""Programs around the core: planning, reports, the hub, tools of the command line. The core imports
none of it.
"""
