"""The board: a live page of the runs of a folder, on a port of this machine that needs its token.

server.py   what a browser may ask for, and who may ask
found.py    the runs, and their reports
growth.py   their rows as they grow
jobs.py     stopping a run, and starting its own command again
chat.py     a checkpoint that answers
page.html   the page, with board.css and board.js; charts and tables are those of the report
"""
