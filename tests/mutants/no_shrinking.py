"""A plugin of pytest: what a property test finds counts as it is, and no time goes into making it
small."""

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=(Phase.explicit, Phase.generate))
settings.load_profile("no shrinking")
