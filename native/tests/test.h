// A test is a function whose name is a sentence. Each runs in a process of its own, so that it meets a fresh plug-in,
// and a crash or a leak report counts against it alone.
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct test {
    const char * name;
    void (*run)(void);
};

#define TEST(function) { #function, function }

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);       \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

#define CHECK_INT(actual, expected)                                                         \
    do {                                                                                    \
        const long long a_ = (long long) (actual), e_ = (long long) (expected);             \
        if (a_ != e_) {                                                                     \
            fprintf(stderr, "%s:%d: %s is %lld, not %s = %lld\n", __FILE__, __LINE__,       \
                    #actual, a_, #expected, e_);                                            \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

#define CHECK_TEXT(actual, expected)                                                        \
    do {                                                                                    \
        const char * t_ = (actual);                                                         \
        if (!t_ || strcmp(t_, (expected))) {                                                \
            fprintf(stderr, "%s:%d: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__,        \
                    #actual, t_ ? t_ : "(null)", (expected));                               \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

// Runs all, or those whose name contains the first argument.
static inline int test_main(const struct test * tests, size_t n, int argc, char ** argv) {
    int failed = 0, ran = 0;
    for (size_t i = 0; i < n; i++) {
        if (argc > 1 && !strstr(tests[i].name, argv[1])) {
            continue;
        }
        ran++;
        fflush(NULL);
        const pid_t child = fork();
        if (child == 0) {
            tests[i].run();
            exit(0);
        }
        int status = -1;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
            failed++;
            if (WIFSIGNALED(status)) {
                fprintf(stderr, "killed by signal %d\n", WTERMSIG(status));
            }
        }
        printf("%s %s\n", status == 0 ? "ok  " : "FAIL", tests[i].name);
    }
    printf("%d tests, %d failed\n", ran, failed);
    return failed || !ran ? 1 : 0;
}

#define TEST_MAIN(tests)                                                              \
    int main(int argc, char ** argv) {                                                \
        return test_main(tests, sizeof(tests)/sizeof((tests)[0]), argc, argv);        \
    }
