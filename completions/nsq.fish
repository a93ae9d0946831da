# fish completion for nsq, which says itself what can follow.

function __nsq_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l nsq (string replace -r -- '^~/' "$HOME/" $before[1])
    set -l found ($nsq __complete_line fish $before "$current" 2>/dev/null </dev/null)
    set -q found[1]; or return # after an error, or a second without an answer
    set -l head (string split ' ' -- $found[1])
    set -l prefix (string sub -l $head[2] -- "$current")
    set -l value (string sub -s (math $head[2] + 1) -- "$current")
    switch $head[1]
        case files
            # the files that fish offers to a command it knows nothing of
            printf '%s\n' $prefix(complete -C "__nsq_of_files $value")
        case dirs
            printf '%s\n' $prefix(__fish_complete_directories $value)
        case '*'
            printf '%s\n' $found[2..]
    end
end

complete -c nsq -f -a '(__nsq_complete)'
