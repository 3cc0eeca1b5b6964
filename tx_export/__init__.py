"""A compiler from PyTorch Transformers to ONNX artifacts that run without PyTorch.

    source --load--> EagerModel --module passes--> EagerModel --export--> onnx_ir.Model --graph passes--> onnx_ir.Model
                                                                                              |
                                  compare / bench / run  <--open--  artifact folder  <--write-+

A file imports only from floors below its own:

    8  cli  __main__                                    arguments in; text, JSON and exit codes out
    7  benchmark  sweep                                 many builds, many runs
    6  compiler                                         build
    5  verify  training                                 compare; train, distill
    4  load  lint  export  artifact  testing            the steps, each usable alone
    3  models.*  quantize.*  optimize.*  providers.*    plug-ins, one file each
    2  spec  metrics  timing  passes  plugins           the words the rest is written in
    1  errors
    0  runtime  runtime_generate                        stand alone: numpy, onnxruntime, tokenizers
"""

__version__ = "0.1.0"
