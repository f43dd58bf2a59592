/* Issue prepared calls of NCCL back to back, so that no interpreter runs between two of them.
 *
 * Compiled on demand by issue_loop.py, which has the same struct and numbers of signatures.
 * Prototypes are those of src/nccl.h.in of NVIDIA/nccl 2.28; a stream is a pointer.
 */
#include <stddef.h>

enum signature { GROUP, GATHER, REDUCE_ALL, REDUCE, SEND };

struct step {
  void (*function)(void);
  int signature;
  int integers[3]; /* type, then what the signature has of operation, root and peer */
  void *buffers[2];
  size_t count;
  void *comm;
  void *stream;
};

typedef int (*group_call)(void);
typedef int (*gather_call)(void *, void *, size_t, int, void *, void *);
typedef int (*reduce_all_call)(void *, void *, size_t, int, int, void *, void *);
typedef int (*reduce_call)(void *, void *, size_t, int, int, int, void *, void *);
typedef int (*send_call)(void *, size_t, int, int, void *, void *);

static int make(const struct step *s) {
  void *const *b = s->buffers;
  const int *i = s->integers;
  switch (s->signature) {
  case GROUP:
    return ((group_call)s->function)();
  case GATHER:
    return ((gather_call)s->function)(b[0], b[1], s->count, i[0], s->comm, s->stream);
  case REDUCE_ALL:
    return ((reduce_all_call)s->function)(b[0], b[1], s->count, i[0], i[1], s->comm, s->stream);
  case REDUCE:
    return ((reduce_call)s->function)(b[0], b[1], s->count, i[0], i[1], i[2], s->comm, s->stream);
  case SEND:
    return ((send_call)s->function)(b[0], s->count, i[0], i[1], s->comm, s->stream);
  }
  return -1;
}

/* Make num_calls calls, one per operand set in turn from set `first` on. steps has those of all
 * sets. Return the first result that is not ncclSuccess, and the number of its step. */
int stepmark_issue(const struct step *steps, size_t steps_per_call, size_t num_sets, size_t first,
                   size_t num_calls, size_t *failed) {
  for (size_t call = 0; call < num_calls; call++) {
    size_t set = (first + call) % num_sets;
    for (size_t at = set * steps_per_call; at < (set + 1) * steps_per_call; at++) {
      int result = make(&steps[at]);
      if (result) {
        *failed = at;
        return result;
      }
    }
  }
  return 0;
}
