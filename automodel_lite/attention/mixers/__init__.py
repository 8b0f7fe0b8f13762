"""Layers that mix tokens in other ways than attention: state spaces, delta rules, convolutions. A
model that has one is given what is here (attention/families.yaml).
"""
