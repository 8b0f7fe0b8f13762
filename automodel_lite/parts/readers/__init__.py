"""What opens data that are not plain text: tables, datasets, compressed files, addresses."""
