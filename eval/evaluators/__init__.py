"""Evaluators, one file each, and their commands; their configurations are those of `lit_het.eval.suite`."""

# Beside the name of each, its line in `lit-het --help` and the text of its own --help: both need no evaluator.
COMMANDS = {
    "zero-shot": (
        "classify images by the class names",
        "Scores every image of each data set against the class names; a classifier is scored on the classes that it "
        "was trained on. Reports the model as trained, with a temperature fitted on other images (calibrated), and "
        "averaged over noise samples (noisy; --samples), with prediction sets and errors of the most confident "
        "images.",
    ),
    "retrieval": (
        "find texts for images and images for texts",
        "Recall of captions by images and of images by captions, with several captions per image.",
    ),
    "few-shot": (
        "classify with a few training images per class",
        "Fits ridge regressions to the features of 1, 5, 10 and 25 images per class. Several data sets are followed "
        "by the mean over them.",
    ),
    "linear-probe": (
        "train a linear classifier on the features of an image tower",
        "Trains a grid of linear classifiers on the features of the training split and evaluates the best.",
    ),
    "shift": (
        "measure accuracy and calibration on corrupted images",
        "Evaluates a data set and its corrupted copies, made by 'lit-het data corrupt'.",
    ),
    "out-of-distribution": (
        "measure the detection of out-of-distribution images",
        "Distinguishes images of the data set from those of other sets by probability, entropy, energy, noise and "
        "feature distance.",
    ),
    "ensemble": (
        "evaluate an ensemble and the diversity of its members",
        "Joint and individual metrics of the members of an e3 model, of noise samples, of the runs of lit-het train "
        "--members, or of several checkpoints, among which --select chooses.",
    ),
    "panoptic": (
        "score the masks of panoptic segmentation",
        "Panoptic quality, segmentation quality and recognition quality of all classes, things and stuff, at the size "
        "of the true masks and by the rules of COCO's evaluation.",
    ),
    "captioning": (
        "score the captions that a decoder writes",
        "CIDEr-D, BLEU-4, ROUGE-L and exact match of captions, perplexity of the true ones, and the calibration of "
        "captions and of single tokens; also averaged over noise samples (noisy; --samples).",
    ),
    "question-answering": (
        "score the answers of a decoder to questions",
        "VQA accuracy, exact match or ANLS (--figure) of answers that are written or chosen (--candidates), and their "
        "calibration; also averaged over noise samples (noisy; --samples).",
    ),
}
