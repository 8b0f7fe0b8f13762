"""The known formats (`known.py`), and what makes a document of a row of each."""
