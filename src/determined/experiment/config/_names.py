"""Names for experiments whose config gives none."""

from __future__ import annotations

import random

_FIRST = """
    amber ancient balmy bold brave breezy bright brisk calm candid cheerful clear clever cosy crisp curious
    dapper daring dewy eager early easy fair fearless fleet floral fond fresh gentle gilded glad golden graceful
    grand happy hardy hazel honest humble jolly joyful keen kind lively loyal lucid lucky mellow merry mighty
    mild mossy nimble noble patient placid playful polite proud quick quiet radiant ready rosy royal rustic sage
    serene shiny silent silver simple smooth snowy solid spry steady sunny sure sweet swift tidy tranquil true
    upbeat velvet vivid warm wise witty young zesty
"""
_SECOND = """
    acorn alder arch aspen badger bay beacon beaver birch bison brook canyon cedar clover comet cove crane creek
    dawn delta dolphin dune ember falcon fern finch fjord forest fox garden geyser glade grove gull harbor hare
    hawk heath heron hill island ivy jay juniper kestrel lagoon lake lark laurel lily lynx maple marten meadow
    mesa moon moss oak ocean orchard orchid osprey otter owl pebble pine plover pond poplar prairie puffin quail
    raven reef ridge river robin rowan salmon seal shore sparrow spring spruce star stone stream swan thistle
    thrush tide trail valley violet walnut willow wren
"""
# Not the shared generator: a name must not change what a seeded program draws.
_random = random.SystemRandom()


def generated_name() -> str:
    """Return two pleasant words, such as 'quiet-otter'."""
    return f"{_random.choice(_FIRST.split())}-{_random.choice(_SECOND.split())}"
