"""`automodel-lite proof`: what this project claims, computed again on the reader's machine.

rows.py      one function a row: runs commands that can be typed, and compares what they wrote
work.py      the folder of a proof, the commands, and the curves of runs
data.py      chats, pictures and a pretrained model from the package index; made-up rows
plain.py     the same tokens in plain transformers
packers.py   packers of peers beside ours, and tokens of trees beside rows
"""
