"""The search methods: one module each, with the method and the section of the config that configures it.

Importing this package registers all of them; a new method is a new module in this folder.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
