"""What the configurations of evaluations say of them: commands ask these questions, and not for the class."""

from lit_het.eval.sets import ImageSet


class EvaluationOptions:
    """An evaluation of one model; configurations are frozen dataclasses that replace what they need.

    Attributes:
        data: the set.
        takes_several_models: whether several models are evaluated together.
        has_means: whether evaluations of several sets are followed by means over them.
        classes_are_captions: whether the captions of the images are the candidate classes.
        main_figure: by which models are compared where none is named; None where one must be.
    """

    data: ImageSet
    main_figure: str | None = None

    takes_several_models = has_means = classes_are_captions = False
