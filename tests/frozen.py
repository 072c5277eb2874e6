"""The last import of the server that tests fork processes from: the collector passes over what it has made.

Else each of them would walk through all objects of PyTorch and transformers, again and again.
"""

import gc

gc.collect()
gc.freeze()
