"""Sections of the configuration from short names, so that a test names only the settings that it is about."""

from pydantic import BaseModel

from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.sections import TrainerSection


def actor_section(**settings):
    """Return the actor's section with these settings, named as in `nested`."""
    return ActorSection.model_validate(nested(ActorSection, settings))


def trainer_section(**settings):
    """Return the trainer's section with these settings, named as in `nested`."""
    return TrainerSection.model_validate(nested(TrainerSection, settings))


def changed(section, **settings):
    """Return the section with these settings changed, named as in `nested`."""
    given = section.model_dump(exclude_unset=True)
    for name, value in nested(type(section), settings).items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    return type(section).model_validate(given)


def nested(section, settings):
    """Return the settings in the form of the YAML.

    A name is a key's path joined by underscores (`kl_coef`), or its last part if no other key has it (`lr`).
    """
    found = {}
    for name, value in settings.items():
        *parents, last = _path_of(section, name)
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return found


def _path_of(section, name):
    if name in section.model_fields:
        return (name,)
    paths = [path for path in _paths(section) if name in ("_".join(path), path[-1])]
    assert len(paths) == 1, f"{name} is no setting of {section.__name__}, or of several sections: {paths}"
    return paths[0]


def _paths(section):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ((name, *path) for path in _paths(field.annotation))
        else:
            yield (name,)
