"""One way to run a torch language model: rows and passes, hooks, decoding, teacher forcing, capture.

It knows a model as a module tree with hook points; which library wrapped the model is the engines' affair.
"""
